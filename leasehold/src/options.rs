//! The options of [`Locks`] as they are written in a URL. One more is one more line here.

use leasehold_core::{Claim, Key, Locks, Memory, Result};

use crate::setting::Setting;

type Apply = fn(&Locks, &Setting) -> Result<Locks>;

const OPTIONS: &[(&str, Apply)] = &[
    ("ttl", |locks, value| {
        let ttl = value.duration()?;
        check_ttl(value, ttl)?;
        Ok(locks.with_ttl(ttl))
    }),
    (
        "wait",
        |locks, value| Ok(locks.with_wait(value.duration()?)),
    ),
    ("fixed_lease", |locks, value| {
        let lease = value.duration()?;
        check_ttl(value, lease)?;
        Ok(locks.with_fixed_lease(lease))
    }),
    ("max_hold", |locks, value| {
        Ok(locks.with_max_hold(value.limit()?))
    }),
    ("label", |locks, value| Ok(locks.with_label(value.text()))),
    ("request_limit", |locks, value| {
        Ok(locks.with_request_limit(value.limit()?))
    }),
];

/// Their names.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|(name, _)| *name)
}

/// Gives `locks` those of `settings` that are options of [`Locks`].
pub(crate) fn apply(locks: Locks, settings: &[Setting]) -> Result<Locks> {
    settings.iter().try_fold(locks, |locks, setting| {
        match OPTIONS.iter().find(|(name, _)| *name == setting.name()) {
            Some((_, apply)) => apply(&locks, setting),
            None => Ok(locks),
        }
    })
}

/// Refuses what [`apply`] would refuse, before anything is opened.
pub(crate) fn check(settings: &[Setting]) -> Result<()> {
    apply(Locks::new(Memory::new()), settings).map(drop)
}

/// The range is known where claims are made: make one.
fn check_ttl(value: &Setting, ttl: std::time::Duration) -> Result<()> {
    match Claim::new(Key::new("any")?, ttl) {
        Ok(_) => Ok(()),
        Err(error) => Err(value.wrong(&format!("cannot be: {error}"))),
    }
}
