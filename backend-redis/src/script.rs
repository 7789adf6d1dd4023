use std::sync::LazyLock;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisResult, Script, ServerErrorKind, Value};

macro_rules! script {
    ($($part:literal),+) => {
        LazyLock::new(|| Script::new(concat!($(include_str!(concat!("scripts/", $part))),+)))
    };
}

/// The scripts; what each does, takes and returns stands at its head.
pub(crate) static ACQUIRE: LazyLock<Script> =
    script!("acquire_free.lua", "hand_over.lua", "acquire.lua");
pub(crate) static RELEASE: LazyLock<Script> =
    script!("release_free.lua", "hand_over.lua", "release.lua");
pub(crate) static RENEW: LazyLock<Script> = script!("renew.lua");
/// Many of the three above in one call.
pub(crate) static TOGETHER: LazyLock<Script> = script!(
    "together_acquire.lua",
    "acquire_free.lua",
    "hand_over.lua",
    "acquire.lua",
    "together_release.lua",
    "release_free.lua",
    "hand_over.lua",
    "release.lua",
    "together_renew.lua",
    "renew.lua",
    "together.lua"
);
pub(crate) static HOLDER: LazyLock<Script> = script!("holder.lua");
pub(crate) static EVICT: LazyLock<Script> = script!("hand_over.lua", "evict.lua");
pub(crate) static PROBE: LazyLock<Script> = script!("hand_over.lua", "probe.lua");

/// Those that are loaded as soon as a connection stands.
pub(crate) fn all() -> [&'static Script; 6] {
    [&ACQUIRE, &RELEASE, &RENEW, &TOGETHER, &HOLDER, &EVICT]
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
pub(crate) async fn send(
    connection: &mut MultiplexedConnection,
    script: &Script,
    cmd: &Cmd,
) -> RedisResult<Value> {
    let answer = connection
        .send_packed_command(cmd)
        .await
        .and_then(Value::extract_error);
    match answer {
        Err(e) if e.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            script.load_async(connection).await?;
            connection
                .send_packed_command(cmd)
                .await
                .and_then(Value::extract_error)
        }
        answer => answer,
    }
}
