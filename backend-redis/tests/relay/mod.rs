//! Sentinels as a client sees them across a network that translates addresses: what they answer names
//! other ports, behind which stand proxies.
#![allow(clippy::unwrap_used, reason = "a part of tests")]

use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Puts a relay in front of each sentinel of `url`, which writes the second port of each pair for the
/// first, and returns the URL with the relays. They last as long as the runtime.
pub(crate) async fn sentinels(url: &str, ports: &[(&str, &str)]) -> String {
    let (scheme, rest) = url.split_once("://").unwrap();
    let (sentinels, master) = rest.split_once('/').unwrap();
    let mut relays = Vec::new();
    for sentinel in sentinels.split(',') {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        relays.push(listener.local_addr().unwrap().to_string());
        let ports = ports.iter().map(|(from, to)| (bulk(from), bulk(to)));
        tokio::spawn(serve(listener, sentinel.to_owned(), ports.collect()));
    }
    format!("{scheme}://{}/{master}", relays.join(","))
}

/// A port as an answer spells it. Messages have it in the middle of a text: what they say is not
/// looked at by any client that asks again.
fn bulk(port: &str) -> Vec<u8> {
    format!("${}\r\n{port}\r\n", port.len()).into_bytes()
}

type Ports = Vec<(Vec<u8>, Vec<u8>)>;

async fn serve(listener: TcpListener, sentinel: String, ports: Ports) {
    while let Ok((client, _)) = listener.accept().await {
        let Ok(server) = TcpStream::connect(&sentinel).await else {
            continue;
        };
        let ports = ports.clone();
        tokio::spawn(async move {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            let there = async { drop(tokio::io::copy(&mut from_client, &mut to_server).await) };
            let back = async {
                let mut buffer = vec![0; 64 * 1024];
                // An answer of a sentinel is a few KiB and comes in one piece.
                while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                    let answer = rewritten(&buffer[..length], &ports);
                    if to_client.write_all(&answer).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = there => {}
                () = back => {}
            }
        });
    }
}

fn rewritten(answer: &[u8], ports: &Ports) -> Vec<u8> {
    let mut new = Vec::with_capacity(answer.len());
    let mut rest = answer;
    while !rest.is_empty() {
        if let Some((from, to)) = ports.iter().find(|(from, _)| rest.starts_with(from)) {
            new.extend(to);
            rest = &rest[from.len()..];
        } else {
            new.push(rest[0]);
            rest = &rest[1..];
        }
    }
    new
}
