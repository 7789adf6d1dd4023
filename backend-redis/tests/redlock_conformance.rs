//! The suite on five independent Redis servers.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_conformance::{Control, Harness, Store};
use leasehold_core::{Backend, Claim, Result};
use leasehold_redis::{Redlock, RedlockOptions};

#[derive(Debug)]
struct FiveServers;

#[async_trait]
impl Harness for FiveServers {
    async fn start(&self) -> Result<Store, Missing> {
        let mut servers = Vec::new();
        for _ in 0..5 {
            let server = RedisServer::start([""; 0]).await;
            servers.push(server.map_err(|error| Missing::new("redis", format!("{error:#}")))?);
        }
        let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
        let ports = servers.iter().map(|it| format!("127.0.0.1:{}", it.port()));
        Ok(Store::new(urls.join(","))
            // Five servers on a machine that may be busy.
            .with_ttl(Duration::from_secs(1))
            .with_processes()
            .with_servers(ports.collect::<Vec<_>>())
            .with_control(Arc::new(Servers(servers))))
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        // The servers are new: nobody has a lock that they could have forgotten. What the guard does
        // is tried in `redlock.rs`.
        let options = RedlockOptions::new(address.split(','))?
            .with_restart_guard(false)
            // The limit that each request has is enough on a busy machine.
            .with_node_timeout(Duration::from_secs(60))
            .with_max_ttl(*Claim::TTL_RANGE.end());
        Ok(Box::new(Redlock::connect_with(options).await?))
    }
}

struct Servers(Vec<RedisServer>);

#[async_trait]
impl Control for Servers {
    async fn pause(&self) -> anyhow::Result<()> {
        for server in &self.0 {
            server.process().pause()?;
        }
        Ok(())
    }

    async fn resume(&self) -> anyhow::Result<()> {
        for server in &self.0 {
            server.process().resume()?;
        }
        Ok(())
    }

    async fn restart(&self) -> anyhow::Result<()> {
        for server in &self.0 {
            server.process().kill();
        }
        for server in &self.0 {
            server.start_again().await?;
        }
        Ok(())
    }

    fn members(&self) -> usize {
        self.0.len()
    }

    /// None leads: any one of them.
    async fn kill_leader(&self) -> anyhow::Result<()> {
        self.0[0].process().kill();
        Ok(())
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(FiveServers)
}
