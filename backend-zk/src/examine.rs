//! What the servers say of themselves.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use leasehold_core::{Examination, Examined, Moment, Result, Severity};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error;
use crate::options::ZooKeeperOptions;
use crate::session::{Answer, Session};

/// The servers that vote, as the ensemble's own configuration has them.
pub(crate) struct Ensemble {
    voting: usize,
    /// How many may be lost.
    pub(crate) spare: u32,
}

impl Ensemble {
    pub(crate) async fn ask(session: &Session, limit: Duration) -> Answer<Self> {
        let (text, _) = session
            .ask(limit, async |client| client.get_config().await)
            .await?;
        let named = session.options().servers();
        Ok(Self::read(&String::from_utf8_lossy(&text), named))
    }

    /// Reads lines like `server.1=host:2888:3888:participant;2181`. A single server has none.
    ///
    /// Where servers have weights or groups, which of them make a majority is not known here: then
    /// none may be lost.
    fn read(text: &str, named: &str) -> Self {
        let voting: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("server.") && !line.contains(":observer"))
            .filter_map(|line| line.split_once('='))
            .filter_map(|(_, server)| host(server))
            .collect();
        let plain = !text
            .lines()
            .any(|line| line.starts_with("group.") || line.starts_with("weight."));
        let majority_spares = voting.len().saturating_sub(1) / 2;
        let named: Vec<&str> = named.split(',').collect();
        let known = |name: &&str| host(name).is_some_and(|host| voting.contains(&host));
        // A name that is no server's own may be that of a balancer before all of them.
        let spare = match named.iter().all(known) {
            true => majority_spares.min(named.len().saturating_sub(1)),
            false => majority_spares,
        };
        Self {
            voting: voting.len().max(1),
            spare: if plain {
                u32::try_from(spare).unwrap_or(u32::MAX)
            } else {
                0
            },
        }
    }
}

/// The host in `host:port…` or `[host]:port…`.
fn host(address: &str) -> Option<&str> {
    match address.strip_prefix('[') {
        Some(rest) => rest.split(']').next(),
        None => address.split(':').next(),
    }
}

/// In a session of its own, as long as the locks' would be.
pub(crate) async fn examine(options: &Arc<ZooKeeperOptions>, ttl: Duration) -> Result<Examination> {
    let limit = options.connect_timeout();
    let session = Session::open(options.clone(), ttl, limit).await?;
    let mut examination = Examination::new();
    judge_session(&session, ttl, &mut examination);
    judge_ensemble(&session, limit, &mut examination).await;
    let mut asking = JoinSet::new();
    // The word goes over plain TCP only: where there is TLS, nothing is known of each server.
    let plain = options.tls().is_none();
    if !plain {
        examination.find(
            Severity::Note,
            "not-asked",
            "over TLS no server is asked for its version and mode: whether all of them are up was not judged",
            "look at each with ZooKeeper's own tools",
        );
    }
    let asked = options.servers().split(',').filter(|_| plain);
    for (index, server) in asked.enumerate() {
        let server = server.to_owned();
        let _task = asking.spawn(async move { (index, status(&server, limit).await, server) });
    }
    let mut answers = asking.join_all().await;
    answers.sort_by_key(|(index, ..)| *index);
    for (_, answer, server) in answers {
        let mut examined = Examined::new(&server);
        match answer {
            Ok(text) => read_status(&text, &mut examined, &mut examination),
            Err(error) => examination.find(
                Severity::Warning,
                "server-down",
                format!("{server} does not answer: {error}"),
                "bring it back: one more may be too many",
            ),
        }
        examination.servers.push(examined);
    }
    // Whichever of them the session is on.
    let clock = clock(&session, limit).await;
    session.close(Session::SHORTEST).await;
    let (now, taken) = clock.map_err(|error| error::map(options.servers(), &error))?;
    let mut writes = Examined::new("the ensemble");
    writes.round_trip = Some(taken);
    writes.clock(now, taken);
    writes.fact("session", format!("{:?}", session.timeout()));
    examination.servers.push(writes);
    Ok(examination)
}

fn judge_session(session: &Session, ttl: Duration, examination: &mut Examination) {
    let granted = session.timeout();
    if granted < ttl {
        examination.find(
            Severity::Warning,
            "session-cut",
            format!("the servers cut the session to {granted:?}, below the ttl of {ttl:?}: a client that is silent for that long loses its locks"),
            "raise maxSessionTimeout (by default 20 ticks) on the servers, or use a shorter ttl",
        );
    }
}

async fn judge_ensemble(session: &Session, limit: Duration, examination: &mut Examination) {
    let Ensemble { voting, spare } = match Ensemble::ask(session, limit).await {
        Ok(ensemble) => ensemble,
        Err(error) => {
            examination.find(
                Severity::Warning,
                "servers-unknown",
                format!("which servers vote could not be asked ({error})"),
                "let everybody read /zookeeper/config; without that, this client promises to survive the loss of none",
            );
            return;
        }
    };
    if voting < 3 {
        examination.find(
            Severity::Warning,
            "too-few-servers",
            format!("servers that vote: {voting}. When one is lost no lock is granted or kept, and tokens are as safe as its disk"),
            "run three or five servers",
        );
    } else if (spare as usize) < (voting - 1) / 2 {
        examination.find(
            Severity::Warning,
            "servers-not-named",
            format!("{voting} servers vote, but this client was told of too few of them, or they vote in groups: {spare} of them may be lost"),
            "name all servers in the URL, with commas between them",
        );
    }
}

/// The leader's clock, and how long a write takes.
async fn clock(session: &Session, limit: Duration) -> Answer<(SystemTime, Duration)> {
    const TIMES: usize = 3;
    let mut best = None;
    for _ in 0..TIMES {
        let sent = Moment::now();
        let wrote = session.write_sign_of_life(limit).await?;
        let taken = sent.elapsed();
        if best.is_none_or(|(_, shortest)| taken < shortest) {
            best = Some((wrote, taken));
        }
    }
    best.ok_or(zookeeper_client::Error::Timeout)
}

/// What the server answers to `srvr`, the only one of its words that is allowed by default.
async fn status(server: &str, limit: Duration) -> std::io::Result<String> {
    const PORT: &str = ":2181";
    let with_port = format!("{server}{PORT}");
    let has_port = server
        .rsplit_once(':')
        .is_some_and(|(_, port)| !port.contains(']'));
    let address = if has_port { server } else { &with_port };
    let asking = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"srvr").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    };
    timeout(limit, asking).await.unwrap_or_else(|_elapsed| {
        Err(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            format!("no answer within {limit:?}"),
        ))
    })
}

fn read_status(text: &str, server: &mut Examined, examination: &mut Examination) {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    let version = field("Zookeeper version: ");
    server.version = version
        .and_then(|version| version.split([',', '-']).next())
        .map(str::to_owned);
    if let Some(mode) = field("Mode: ") {
        server.fact("mode", mode);
    }
    let address = &server.address;
    if text.contains("not currently serving") {
        examination.find(
            Severity::Warning,
            "server-not-serving",
            format!("{address} does not serve: it does not reach a majority of the others"),
            "see its log, and whether it reaches the others",
        );
    } else if version.is_none() {
        examination.find(
            Severity::Note,
            "not-asked",
            format!("{address} does not say its version and mode"),
            "name the server by its own address, if something stands before it",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: &str = "server.1=a:2888:3888:participant;0.0.0.0:2181\n\
                         server.2=b:2888:3888:participant\n\
                         server.3=[::3]:2888:3888\n\
                         server.4=d:2888:3888:observer\n\
                         version=100000000";

    #[test]
    fn a_majority_and_somebody_to_turn_to_must_be_left() {
        let spare = |text: &str, named| Ensemble::read(text, named).spare;
        assert_eq!(Ensemble::read(THREE, "a").voting, 3);
        assert_eq!(spare(THREE, "a:2181,b,[::3]:2181"), 1);
        assert_eq!(spare(THREE, "b:2181"), 0);
        assert_eq!(spare(THREE, "balancer:2181"), 1);
        assert_eq!(spare("", "a:2181"), 0);
        assert_eq!(spare("version=0", "a:2181,b:2181"), 0);
        let grouped = format!("{THREE}\ngroup.1=1:2:3");
        assert_eq!(spare(&grouped, "a,b,[::3]"), 0);
    }

    #[test]
    fn a_status_is_read() {
        let mut server = Examined::new("here:1");
        let mut examination = Examination::new();
        let text = "Zookeeper version: 3.8.0-5a02a05eddb59aee6ac762f7ea82e92a68eb9c0f, built on …\nMode: follower\n";
        read_status(text, &mut server, &mut examination);
        assert_eq!(server.version.as_deref(), Some("3.8.0"));
        assert_eq!(server.facts[0].1, "follower");
        assert!(examination.findings.is_empty());
        let text = "This ZooKeeper instance is not currently serving requests\n";
        read_status(text, &mut server, &mut examination);
        assert_eq!(examination.findings[0].id, "server-not-serving");
        read_status(
            "HTTP/1.1 400 Bad Request\r\n",
            &mut server,
            &mut examination,
        );
        assert_eq!(examination.findings[1].id, "not-asked");
    }
}
