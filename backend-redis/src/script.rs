use std::sync::LazyLock;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, Pipeline, RedisResult, Script, ServerErrorKind, Value};

macro_rules! script {
    ($($part:literal),+) => {
        Script::new(concat!($(include_str!(concat!("scripts/", $part))),+))
    };
}

/// The scripts that mint tokens, which is done differently on a single server and in a cluster; what
/// each script does, takes and returns stands at its head.
#[derive(Debug)]
pub(crate) struct Minting {
    pub(crate) acquire: Script,
    pub(crate) release: Script,
    pub(crate) evict: Script,
    /// Loaded with them: many of them in one call.
    together: Option<&'static LazyLock<Script>>,
}

pub(crate) static ON_A_SERVER: LazyLock<Minting> = LazyLock::new(|| Minting {
    acquire: script!(
        "acquire_free.lua",
        "hand_over.lua",
        "find.lua",
        "acquire.lua"
    ),
    release: script!(
        "release_free.lua",
        "hand_over.lua",
        "find.lua",
        "release.lua"
    ),
    evict: script!("hand_over.lua", "evict.lua"),
    together: Some(&TOGETHER),
});
pub(crate) static IN_A_CLUSTER: LazyLock<Minting> = LazyLock::new(|| Minting {
    acquire: script!(
        "cluster_floor.lua",
        "acquire_free.lua",
        "hand_over.lua",
        "find.lua",
        "acquire.lua"
    ),
    release: script!(
        "release_free.lua",
        "cluster_floor.lua",
        "hand_over.lua",
        "find.lua",
        "release.lua"
    ),
    evict: script!("cluster_floor.lua", "hand_over.lua", "evict.lua"),
    together: None,
});
pub(crate) static RENEW: LazyLock<Script> = LazyLock::new(|| script!("renew.lua"));
/// Many of the three in one call, on a single server.
pub(crate) static TOGETHER: LazyLock<Script> = LazyLock::new(|| {
    script!(
        "together_acquire.lua",
        "acquire_free.lua",
        "hand_over.lua",
        "find.lua",
        "acquire.lua",
        "together_release.lua",
        "release_free.lua",
        "hand_over.lua",
        "find.lua",
        "release.lua",
        "together_renew.lua",
        "renew.lua",
        "together.lua"
    )
});
pub(crate) static HOLDER: LazyLock<Script> = LazyLock::new(|| script!("holder.lua"));
pub(crate) static LISTED: LazyLock<Script> = LazyLock::new(|| script!("listed.lua"));
pub(crate) static FREE: LazyLock<Script> = LazyLock::new(|| script!("free.lua"));
pub(crate) static LEAVE: LazyLock<Script> = LazyLock::new(|| script!("find.lua", "leave.lua"));
pub(crate) static PROBE: LazyLock<Script> = LazyLock::new(|| script!("hand_over.lua", "probe.lua"));

impl Minting {
    /// What is loaded as soon as a connection stands: these, and the others that are used all the time.
    pub(crate) fn and_others(&'static self) -> impl Iterator<Item = &'static Script> {
        let minting = [&self.acquire, &self.release, &self.evict];
        let others = [&*RENEW, &*HOLDER];
        let together = self.together.map(|script| &**script);
        minting.into_iter().chain(others).chain(together)
    }
}

/// A call of `script`, to be followed by the keys and then the other arguments.
pub(crate) fn call(script: &Script, keys: &[&str]) -> Cmd {
    // Room for our longest: names of a KiB in two keys are rare.
    let mut cmd = Cmd::with_capacity(16, 512);
    cmd.arg("EVALSHA").arg(script.get_hash()).arg(keys.len());
    for key in keys {
        cmd.arg(key);
    }
    cmd
}

/// Sends a call of `script`, as made by [`call`]; if the server has forgotten the script (it was
/// restarted, or told to), loads it again.
///
/// `asking`: of a node that its slot is just coming to; it answers only what is announced.
pub(crate) async fn send(
    connection: &mut MultiplexedConnection,
    script: &Script,
    cmd: &Cmd,
    asking: bool,
) -> RedisResult<Value> {
    match once(connection, cmd, asking).await {
        Err(e) if e.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            script.load_async(connection).await?;
            once(connection, cmd, asking).await
        }
        answer => answer,
    }
}

async fn once(
    connection: &mut MultiplexedConnection,
    cmd: &Cmd,
    asking: bool,
) -> RedisResult<Value> {
    if !asking {
        let answer = connection.send_packed_command(cmd).await;
        return answer.and_then(Value::extract_error);
    }
    // A pair: what is sent at one time by others must not come in between.
    let mut pair = Pipeline::with_capacity(2);
    pair.cmd("ASKING").add_command(cmd.clone());
    let mut last = Value::Nil;
    for answer in connection.send_packed_commands(&pair, 0, 2).await? {
        last = answer.extract_error()?;
    }
    Ok(last)
}
