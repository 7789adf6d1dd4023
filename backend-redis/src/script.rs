use std::sync::LazyLock;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisResult, Script, ServerErrorKind, Value};

/// The scripts; what each does, takes and returns stands at its head.
pub(crate) static ACQUIRE: LazyLock<Script> =
    LazyLock::new(|| granting(include_str!("scripts/acquire.lua")));
pub(crate) static RELEASE: LazyLock<Script> =
    LazyLock::new(|| granting(include_str!("scripts/release.lua")));
pub(crate) static RENEW: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/renew.lua")));
pub(crate) static HOLDER: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/holder.lua")));
pub(crate) static EVICT: LazyLock<Script> =
    LazyLock::new(|| granting(include_str!("scripts/evict.lua")));
pub(crate) static PROBE: LazyLock<Script> =
    LazyLock::new(|| granting(include_str!("scripts/probe.lua")));

/// Those that are loaded as soon as a connection stands.
pub(crate) fn all() -> [&'static Script; 5] {
    [&ACQUIRE, &RELEASE, &RENEW, &HOLDER, &EVICT]
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

fn granting(source: &str) -> Script {
    Script::new(&[include_str!("scripts/hand_over.lua"), source].concat())
}
