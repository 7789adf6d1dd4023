//! What a server says of itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use leasehold_core::{Examination, Examined, Moment, Result, Severity};

use crate::client::Client;
use crate::connection::Connection;
use crate::error;

/// Asks the servers of these clients, and judges what endangers locks that each of them grants alone.
pub(crate) async fn examine(clients: &[Arc<Client>]) -> Result<Examination> {
    let mut examination = Examination::new();
    for client in clients {
        let connection = client.connection().await?;
        let answers = Answers::ask(client, &connection, &mut examination).await?;
        answers.judge(&mut examination);
        answers.judge_persistence(&mut examination);
        examination.servers.push(answers.server);
    }
    Ok(examination)
}

/// What a server answered.
pub(crate) struct Answers {
    pub(crate) server: Examined,
    info: HashMap<String, String>,
    settings: HashMap<String, String>,
}

impl Answers {
    /// # Errors
    /// If the server does not answer. What it refuses to say is a finding.
    pub(crate) async fn ask(
        client: &Client,
        connection: &Arc<Connection>,
        examination: &mut Examination,
    ) -> Result<Self> {
        const TIMES: usize = 3;
        let mut server = Examined::new(&client.address);
        for _ in 0..TIMES {
            let sent = Moment::now();
            let (seconds, micros) = connection
                .ask::<(u64, u64)>(&redis::cmd("TIME"))
                .await
                .map_err(|e| error::map(&client.address, &e))?;
            let taken = sent.elapsed();
            if server.round_trip.is_none_or(|best| taken < best) {
                server.round_trip = Some(taken);
                let since = Duration::from_secs(seconds) + Duration::from_micros(micros);
                server.clock(SystemTime::UNIX_EPOCH + since, taken);
            }
        }
        let info = connection.ask::<String>(&redis::cmd("INFO")).await;
        let info = match info {
            Ok(text) => read_info(&text),
            Err(e) => {
                refused(client, "INFO", "+info", &e, examination);
                HashMap::new()
            }
        };
        let mut settings = HashMap::new();
        for name in ["save", "appendfsync"] {
            let get = redis::cmd("CONFIG").arg("GET").arg(name).to_owned();
            match connection.ask::<HashMap<String, String>>(&get).await {
                Ok(found) => settings.extend(found),
                Err(e) => {
                    refused(client, "CONFIG GET", "+config|get", &e, examination);
                    break;
                }
            }
        }
        let mut answers = Self {
            server,
            info,
            settings,
        };
        answers.show();
        Ok(answers)
    }

    /// What endangers its locks, whether it decides alone or is one of several.
    pub(crate) fn judge(&self, examination: &mut Examination) {
        let address = &self.server.address;
        if self.info("role") == Some("slave") {
            examination.find(
                Severity::Danger,
                "replica",
                format!("{address} is a replica: it grants what its primary grants to others, or refuses to"),
                "connect to the primary",
            );
        }
        let limited = self.info("maxmemory").is_some_and(|limit| limit != "0");
        if let Some(policy) = self.info("maxmemory_policy")
            && limited
            && policy != "noeviction"
        {
            examination.find(
                Severity::Danger,
                "eviction",
                format!("{address} throws locks away when its memory is full (maxmemory-policy {policy}): another may take one that is held"),
                "set maxmemory-policy to noeviction, or keep locks on a server of their own",
            );
        }
    }

    /// What becomes of its locks when it crashes.
    fn judge_persistence(&self, examination: &mut Examination) {
        let address = &self.server.address;
        let Some(appends) = self.info("aof_enabled").map(|on| on == "1") else {
            return;
        };
        let (save, fsync) = (self.setting("save"), self.setting("appendfsync"));
        match (appends, fsync, save) {
            (true, Some("always"), _) => {}
            (true, Some(fsync), _) => examination.find(
                Severity::Note,
                "late-persistence",
                format!("{address} writes to its disk a moment after it has answered (appendfsync {fsync}): if the machine crashes, the newest locks are forgotten while they are held"),
                "set appendfsync to always where that counts",
            ),
            (true, None, _) => {}
            (false, _, Some("")) => examination.find(
                Severity::Warning,
                "no-persistence",
                format!("{address} keeps nothing on disk: a restart forgets all locks, and another may take one that is held"),
                "turn on appendonly, with appendfsync always where that counts",
            ),
            (false, _, Some(_)) => examination.find(
                Severity::Warning,
                "snapshots-only",
                format!("{address} keeps snapshots only: a crash forgets the locks since the last one, and another may take one that is held"),
                "turn on appendonly, with appendfsync always where that counts",
            ),
            (false, _, None) => examination.find(
                Severity::Warning,
                "no-append-only-file",
                format!("{address} keeps snapshots at most: a crash forgets the locks since the last one, and another may take one that is held"),
                "turn on appendonly, with appendfsync always where that counts",
            ),
        }
        let replicas = self.info("connected_slaves").unwrap_or("0");
        if replicas != "0" && self.info("role") != Some("slave") {
            examination.find(
                Severity::Warning,
                "asynchronous-replicas",
                format!("{address} has replicas ({replicas}), which get its locks after it has granted them: after a failover a lock may be given to a second holder"),
                "hand the token to what the lock protects; take etcd, ZooKeeper or Redlock where a failover must not do that",
            );
        }
    }

    /// Whether it loses nothing in a crash.
    pub(crate) fn is_durable(&self) -> bool {
        self.info("aof_enabled") == Some("1") && self.setting("appendfsync") == Some("always")
    }

    fn show(&mut self) {
        let version = self.info("valkey_version").or(self.info("redis_version"));
        self.server.version = version.map(str::to_owned);
        for (name, field) in [
            ("mode", "redis_mode"),
            ("role", "role"),
            ("replicas", "connected_slaves"),
            ("memory limit", "maxmemory_human"),
            ("eviction", "maxmemory_policy"),
            ("append-only file", "aof_enabled"),
        ] {
            if let Some(value) = self.info.get(field) {
                self.server.fact(name, value);
            }
        }
    }

    fn info(&self, name: &str) -> Option<&str> {
        self.info.get(name).map(String::as_str)
    }

    fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str)
    }
}

fn refused(
    client: &Client,
    command: &str,
    rule: &str,
    e: &redis::RedisError,
    examination: &mut Examination,
) {
    examination.find(
        Severity::Note,
        "not-asked",
        format!(
            "{} does not answer {command} ({}): what it would show was not judged",
            client.address,
            error::describe(e)
        ),
        format!("for a look at it, add the right {rule} to the user, or ask as another user"),
    );
}

fn read_info(text: &str) -> HashMap<String, String> {
    text.lines()
        .filter_map(|line| line.trim_end().split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(info: &str, settings: &[(&str, &str)]) -> Vec<(Severity, &'static str)> {
        let mut answers = Answers {
            server: Examined::new("here:1"),
            info: read_info(info),
            settings: settings
                .iter()
                .map(|(name, value)| ((*name).into(), (*value).into()))
                .collect(),
        };
        answers.show();
        let mut examination = Examination::new();
        answers.judge(&mut examination);
        answers.judge_persistence(&mut examination);
        let findings = examination.findings.iter();
        findings.map(|it| (it.severity, it.id)).collect()
    }

    #[test]
    fn a_limit_without_eviction_and_eviction_without_a_limit_are_no_danger() {
        for info in [
            "maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n",
            "maxmemory:1000\r\nmaxmemory_policy:noeviction\r\n",
        ] {
            assert_eq!(found(info, &[]), []);
        }
        let info = "maxmemory:1000\r\nmaxmemory_policy:volatile-lru\r\n";
        assert_eq!(found(info, &[]), [(Severity::Danger, "eviction")]);
    }

    #[test]
    fn persistence_is_judged_by_what_a_crash_loses() {
        let (off, on) = ("aof_enabled:0", "aof_enabled:1");
        assert_eq!(found(on, &[("appendfsync", "always"), ("save", "")]), []);
        assert_eq!(
            found(on, &[("appendfsync", "everysec")]),
            [(Severity::Note, "late-persistence")]
        );
        assert_eq!(
            found(off, &[("save", "")]),
            [(Severity::Warning, "no-persistence")]
        );
        assert_eq!(
            found(off, &[("save", "3600 1")]),
            [(Severity::Warning, "snapshots-only")]
        );
        assert_eq!(
            found(off, &[]),
            [(Severity::Warning, "no-append-only-file")]
        );
    }
}
