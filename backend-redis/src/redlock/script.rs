use std::sync::LazyLock;

use redis::Script;

use crate::script::RENEW;

/// The scripts; what each does, takes and returns stands at its head.
pub(super) static ACQUIRE: LazyLock<Script> =
    LazyLock::new(|| shared(include_str!("scripts/acquire.lua")));
pub(super) static RAISE: LazyLock<Script> =
    LazyLock::new(|| shared(include_str!("scripts/raise.lua")));
pub(super) static FREE: LazyLock<Script> =
    LazyLock::new(|| shared(include_str!("scripts/free.lua")));
pub(super) static EVICT: LazyLock<Script> =
    LazyLock::new(|| shared(include_str!("scripts/evict.lua")));
pub(super) static HOLDER: LazyLock<Script> =
    LazyLock::new(|| shared(include_str!("scripts/holder.lua")));
pub(super) static VOTES: LazyLock<Script> =
    LazyLock::new(|| shared(include_str!("scripts/votes.lua")));
pub(super) static LOOK: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/look.lua")));
pub(super) static SEED: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/seed.lua")));
pub(super) static PROBE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/probe.lua")));

/// Those that are loaded as soon as a connection to a node stands: a vote must not come late because
/// its script is not there yet.
pub(crate) fn all() -> [&'static Script; 8] {
    [
        &ACQUIRE, &RAISE, &RENEW, &FREE, &EVICT, &HOLDER, &LOOK, &SEED,
    ]
}

fn shared(source: &str) -> Script {
    Script::new(&[include_str!("scripts/shared.lua"), source].concat())
}
