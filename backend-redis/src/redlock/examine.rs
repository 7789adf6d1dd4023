//! What the nodes say of themselves, and what of it endangers the majority.

use std::time::Duration;

use leasehold_core::{Error, Examination, Examined, Result, Severity};

use super::backend::{Nodes, unreached};
use super::fanout::Fanout;

/// Asks all nodes at once; fails if none answers.
pub(super) async fn examine(nodes: &Nodes, ttl: Duration) -> Result<Examination> {
    let all = nodes.quorum.nodes();
    let mut examination = Examination::new();
    let mut servers: Vec<Examined> = all.iter().map(|it| Examined::new(it.address())).collect();
    let (mut answered, mut last): (usize, Option<Error>) = (0, None);
    let mut asking = Fanout::new(all.iter().map(|node| Some(node.examine())));
    while let Some((index, answer)) = asking.next().await {
        let address = all[index].address();
        match answer {
            Ok((found, answers, standing)) => {
                answered += 1;
                examination.findings.extend(found.findings);
                answers.judge(&mut examination);
                let mut server = answers.server.clone();
                let votes = standing.token.is_some();
                server.fact("votes", votes);
                server.fact("loses nothing in a crash", answers.is_durable());
                servers[index] = server;
                if !votes {
                    examination.find(
                        Severity::Warning,
                        "node-without-data",
                        format!("{address} is without data and does not vote yet: one more that fails may be too many"),
                        format!("wait: it votes {:?} after it came back", nodes.max_ttl),
                    );
                }
            }
            Err(error) => {
                examination.find(
                    Severity::Warning,
                    "node-down",
                    format!(
                        "{address} does not answer ({error}): one more that fails may be too many"
                    ),
                    "bring it back",
                );
                last = Some(error);
            }
        }
    }
    if answered == 0 {
        return Err(last.unwrap_or_else(|| unreached(all.len())));
    }
    judge_set(nodes, ttl, &servers, &mut examination);
    examination.servers = servers;
    Ok(examination)
}

/// What only the set as a whole shows.
fn judge_set(nodes: &Nodes, ttl: Duration, servers: &[Examined], examination: &mut Examination) {
    let host = |server: &Examined| {
        let address = &server.address;
        address
            .rsplit_once(':')
            .map_or(address.clone(), |(host, _)| host.to_owned())
    };
    let hosts: Vec<String> = servers.iter().map(host).collect();
    let majority = nodes.quorum.majority();
    let shared =
        |host: &&String| hosts.iter().filter(|it| it == host).count() > hosts.len() - majority;
    if let Some(shared) = hosts.iter().find(shared) {
        examination.find(
            Severity::Warning,
            "nodes-share-a-host",
            format!("so many nodes are on {shared} that its loss takes the majority with it"),
            "put them on machines of their own",
        );
    }
    if !nodes.restart_guard {
        examination.find(
            Severity::Danger,
            "no-restart-guard",
            "a node that comes back without its data votes at once (with_restart_guard): a lock that it has forgotten may be given to a second holder",
            "leave the guard on",
        );
    }
    if ttl > nodes.max_ttl {
        examination.find(
            Severity::Warning,
            "long-ttl",
            format!(
                "a ttl of {ttl:?} is refused: it is above max_ttl, {:?}",
                nodes.max_ttl
            ),
            "use a shorter ttl, or raise max_ttl for all clients",
        );
    }
}
