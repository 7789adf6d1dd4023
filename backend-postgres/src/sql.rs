use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use crate::KeyForm;
use crate::key_form::{LockId, hashed};
use crate::peer::{CHANNEL, channel};

/// The statements, as they are sent. Each says which backend answers, so that a pooler that changes
/// the session between statements is noticed.
#[derive(Debug)]
pub(crate) struct Sql {
    pub(crate) key_form: KeyForm,
    /// As a quoted name.
    pub(crate) sequence: String,
    /// For the key `$1`: the token, or NULL if another session has the lock.
    pub(crate) try_lock: SqlStr,
    /// For the key `$1`: whether it was held.
    pub(crate) unlock: SqlStr,
    /// For the one key `$1`, on a session that has no other: whether it was held, however often.
    pub(crate) unlock_alone: SqlStr,
    /// For each of the keys `$1`, whether it was held; for each of the keys `$2`, the token, or NULL if
    /// another session has the lock. Both in the order of the keys.
    ///
    /// `nextval` comes after the lock, in the same row's CASE: so the order of tokens is the order of
    /// grants. No WHERE: the planner may evaluate a function before a filter, or twice. Ordered by the
    /// ordinality, which is the order of the scan already, so that nothing is sorted; that each function
    /// is called once for each key is also what EXPLAIN (VERBOSE) shows.
    pub(crate) together: SqlStr,
    pub(crate) heartbeat: SqlStr,
    /// For a key as `pg_locks` shows it (`$1`, `$2`, `$3`): the backend that answers; the one that has
    /// the lock, or NULL; its start; how many other locks it has; whether it listens. If it does it is
    /// sent the message `$4`.
    ///
    /// Always one row. Backend and start, in microseconds and empty where it is not shown to us, name
    /// a session for ever. Somebody else's shared locks may make more holders than one: then it is any
    /// of them.
    pub(crate) holder: SqlStr,
    /// Of the locks that are held behind the one that `pg_locks` shows as `$1`, `$2`, or from the first
    /// on, the next `$3`: the backend that answers, and in arrays of one length what [`holder`](Self::holder)
    /// has: upper and lower half of each lock, the backend that has it, its start, how many other locks
    /// that has, whether it listens.
    ///
    /// Without those that sessions keep for themselves.
    pub(crate) list: SqlStr,
    /// Whether the backend `$1` has the right to end this session.
    pub(crate) may_end_us: SqlStr,
    /// To each of the channels `$1` the message of `$2`.
    pub(crate) notify: SqlStr,
}

impl Sql {
    pub(crate) fn new(key_form: KeyForm, sequence: &str) -> Result<Self> {
        let sequence = quoted(sequence)?;
        let nextval = nextval(&sequence);
        let key = key_form.arguments("$1::bigint");
        let each = key_form.arguments("k");
        let statement = |text: String| AssertSqlSafe(text).into_sql_str();
        Ok(Self {
            try_lock: statement(format!(
                "SELECT pg_backend_pid(), CASE WHEN pg_try_advisory_lock({key}) THEN {nextval} END"
            )),
            unlock: statement(format!(
                "SELECT pg_backend_pid(), pg_advisory_unlock({key})"
            )),
            unlock_alone: statement(format!(
                "SELECT pg_backend_pid(), pg_advisory_unlock({key}), pg_advisory_unlock_all()"
            )),
            together: statement(format!(
                "SELECT pg_backend_pid(), \
                   ARRAY(SELECT pg_advisory_unlock({each}) \
                     FROM unnest($1::bigint[]) WITH ORDINALITY AS keys (k, n) ORDER BY n), \
                   ARRAY(SELECT CASE WHEN pg_try_advisory_lock({each}) THEN {nextval} END \
                     FROM unnest($2::bigint[]) WITH ORDINALITY AS keys (k, n) ORDER BY n)"
            )),
            heartbeat: statement("SELECT pg_backend_pid()".into()),
            holder: statement(holder()),
            list: statement(list(key_form)),
            may_end_us: statement(
                "SELECT pg_backend_pid(), \
                   coalesce(bool_or(pg_has_role(usesysid, current_user, 'USAGE') \
                     OR pg_has_role(usesysid, 'pg_signal_backend', 'USAGE')), false) \
                 FROM pg_stat_activity WHERE pid = $1 AND usesysid IS NOT NULL"
                    .into(),
            ),
            notify: statement(
                "SELECT pg_backend_pid(), count(pg_notify(channel, message)) \
                 FROM unnest($1::text[], $2::text[]) AS n(channel, message)"
                    .into(),
            ),
            key_form,
            sequence,
        })
    }

    /// Waits for `key` as long as `lock_timeout` lets it: the backend, and the token or an empty text.
    ///
    /// A plain statement that runs into `lock_timeout` writes an error to the server's log, here once
    /// a second for each waiter; a block that catches it does not. When it ends so, the lock may be
    /// held all the same (the grant and the time-out met); asking once more without waiting says.
    pub(crate) fn wait(&self, key: LockId) -> SqlStr {
        let arguments = self.key_form.arguments(&format!("({key})::bigint"));
        let nextval = nextval(&self.sequence);
        AssertSqlSafe(format!(
            "DO $leasehold$ DECLARE held bool := true; BEGIN \
               BEGIN PERFORM pg_advisory_lock({arguments}); \
               EXCEPTION WHEN lock_not_available OR query_canceled THEN held := pg_try_advisory_lock({arguments}); END; \
               PERFORM set_config('leasehold.token', \
                 CASE WHEN held THEN {nextval}::text ELSE '' END, false); \
             END $leasehold$; \
             SELECT pg_backend_pid(), current_setting('leasehold.token')"
        ))
        .into_sql_str()
    }

    /// Sets a new session up, and says what it is: the backend, and whether the server is in recovery.
    ///
    /// Roles and databases may have set limits that would end a wait or forbid `nextval`. Settings
    /// that only newer servers have are set where they are.
    pub(crate) fn set_up(idle_limit: Duration, slice: Duration) -> SqlStr {
        AssertSqlSafe(format!(
            "SET idle_session_timeout = {}; SET lock_timeout = {}; SET statement_timeout = 0; \
             SET idle_in_transaction_session_timeout = 0; SET synchronous_commit = off; \
             SET default_transaction_read_only = off; SET client_min_messages = error; \
             SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'; \
             SELECT pg_backend_pid(), pg_is_in_recovery()",
            idle_limit.as_millis(),
            slice.as_millis().max(1),
        ))
        .into_sql_str()
    }

    /// Lifts the tokens above all that were given before: for a new session, before its first grant.
    ///
    /// A sequence may fall back: by what was not yet written when the server crashed, by what had not
    /// reached the standby that was promoted. The server's clock and the highest token that this
    /// client has seen do not fall back with it. This one transaction is flushed to disk, but waits
    /// for no standby.
    ///
    /// The clock is the floor that all share, so tokens must not run ahead of it: a stranger at a
    /// standby that lacks the last sessions knows nothing else. They stay below the clock and a second,
    /// for fewer are granted in a second than it has µs, and each session lifts them by no more than
    /// what others may be granted meanwhile. (By a second each, a burst of sessions took them that many
    /// seconds ahead, and after a failover they fell.)
    ///
    /// And lets it listen to [operators](crate::peer), and show that it does; a shared session takes
    /// its [reserve](Reserve) too.
    pub(crate) fn begin(&self, pid: i32, seen: i64, reserve: Option<Reserve>) -> SqlStr {
        let Self { sequence, .. } = self;
        AssertSqlSafe(format!(
            "BEGIN; SET LOCAL synchronous_commit = local; SET LOCAL lock_timeout = '5s'; \
             SELECT pg_advisory_xact_lock({}); \
             SELECT setval({}, greatest(last_value + 100000, {seen} + 100000, \
               (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + 1000000)) FROM {sequence}; \
             COMMIT; LISTEN {}; SELECT pg_advisory_lock_shared({}); {}",
            lifting(),
            literal(sequence),
            channel(pid),
            listens(),
            reserve.map(|reserve| reserve.take()).unwrap_or_default(),
        ))
        .into_sql_str()
    }

    /// Interrupts whatever a backend is doing.
    pub(crate) fn interrupt(pid: i32) -> SqlStr {
        AssertSqlSafe(format!("SELECT pg_backend_pid(), pg_cancel_backend({pid})")).into_sql_str()
    }

    /// Ends the session that has `key`, if it is the one named so, and waits until it has ended.
    pub(crate) fn terminate(&self, key: LockId, session: &str) -> SqlStr {
        const PATIENCE_MS: u32 = 3000;
        // Materialized: so that the function is called for the rows that are left, and once for each.
        AssertSqlSafe(format!(
            "WITH holder AS MATERIALIZED (SELECT l.pid FROM pg_locks AS l \
               LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid \
               WHERE l.locktype = 'advisory' AND l.granted AND {HERE} AND {} \
                 AND l.pid || '@' || {START} = {}) \
             SELECT pg_terminate_backend(pid, {PATIENCE_MS}) FROM holder",
            on_key(self.key_form, key),
            literal(session),
        ))
        .into_sql_str()
    }

    /// What somebody with the right to do so must run, if `role` may not.
    pub(crate) fn remedy(&self, role: &str) -> String {
        let Self { sequence, .. } = self;
        format!(
            "CREATE SEQUENCE IF NOT EXISTS {sequence}; \
             GRANT USAGE, SELECT, UPDATE ON SEQUENCE {sequence} TO {};",
            quoted_part(role)
        )
    }
}

fn holder() -> String {
    // Materialized: the server makes the whole of pg_locks each time it is named.
    format!(
        "WITH held AS MATERIALIZED (SELECT pid, classid, objid, objsubid, mode FROM pg_locks \
           WHERE locktype = 'advisory' AND granted AND {here}), \
         own AS (SELECT pid, objid FROM held \
           WHERE classid = {class}::bigint::oid AND objsubid = 1 AND mode = 'ShareLock'), \
         holder AS MATERIALIZED (SELECT pid, pid IN (SELECT pid FROM own WHERE objid = {listens}) AS listens \
           FROM held WHERE classid = $1::bigint::oid AND objid = $2::bigint::oid \
             AND objsubid = $3::smallint LIMIT 1) \
         SELECT pg_backend_pid(), holder.pid, \
           CASE WHEN holder.pid IS NOT NULL \
             THEN (SELECT {start} FROM pg_stat_get_activity(holder.pid)) END, \
           (SELECT count(*) FROM held WHERE held.pid = holder.pid) \
             - (SELECT count(*) FROM own WHERE own.pid = holder.pid) - 1, \
           holder.listens, \
           CASE WHEN holder.listens AND $4::text IS NOT NULL \
             THEN pg_notify('{CHANNEL}' || holder.pid, $4) END \
         FROM (SELECT) AS always LEFT JOIN holder ON true",
        here = HERE,
        class = listens() >> 32,
        listens = listens() & 0xffff_ffff,
        start = START,
    )
}

fn list(form: KeyForm) -> String {
    let (_, _, kind) = form.in_pg_locks(0);
    format!(
        "WITH held AS MATERIALIZED (SELECT pid, classid, objid, objsubid, mode FROM pg_locks \
           WHERE locktype = 'advisory' AND granted AND {here}), \
         own AS (SELECT pid, objid FROM held \
           WHERE classid = {class}::bigint::oid AND objsubid = 1 AND mode = 'ShareLock'), \
         page AS MATERIALIZED (SELECT DISTINCT ON (classid::bigint, objid::bigint) \
             classid::bigint AS class, objid::bigint AS object, pid FROM held \
           WHERE objsubid = {kind} \
             AND NOT (classid = {class}::bigint::oid AND objsubid = 1 AND mode = 'ShareLock') \
             AND NOT ({lifting}) \
             AND ($1::bigint IS NULL OR (classid::bigint, objid::bigint) > ($1, $2::bigint)) \
           ORDER BY classid::bigint, objid::bigint LIMIT $3), \
         seen AS (SELECT class, object, pid, \
             coalesce((SELECT {start} FROM pg_stat_get_activity(page.pid)), '') AS start, \
             (SELECT count(*) FROM held WHERE held.pid = page.pid) \
               - (SELECT count(*) FROM own WHERE own.pid = page.pid) - 1 AS others, \
             page.pid IN (SELECT pid FROM own WHERE objid = {listens}) AS listens \
           FROM page) \
         SELECT pg_backend_pid(), \
           coalesce(array_agg(class ORDER BY class, object), '{{}}'), \
           coalesce(array_agg(object ORDER BY class, object), '{{}}'), \
           coalesce(array_agg(pid ORDER BY class, object), '{{}}'), \
           coalesce(array_agg(start ORDER BY class, object), '{{}}'), \
           coalesce(array_agg(others ORDER BY class, object), '{{}}'), \
           coalesce(array_agg(listens ORDER BY class, object), '{{}}') \
         FROM seen",
        here = HERE,
        class = listens() >> 32,
        listens = listens() & 0xffff_ffff,
        lifting = on_key(KeyForm::Bigint, lifting()),
        start = START,
    )
}

/// Of this database, in `pg_locks`.
const HERE: &str = "database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// When a backend began, in microseconds; empty where it is not shown to us.
const START: &str = "coalesce((extract(epoch FROM backend_start) * 1000000)::bigint::text, '')";

/// A condition on `pg_locks`.
fn on_key(form: KeyForm, key: LockId) -> String {
    let (class, object, kind) = form.in_pg_locks(key);
    format!(
        "classid = {class}::bigint::oid AND objid = {object}::bigint::oid AND objsubid = {kind}"
    )
}

/// The lock under which tokens are lifted.
fn lifting() -> LockId {
    hashed("leasehold: tokens are being lifted")
}

/// The lock that all sessions share which listen to operators. The locks of a [`Reserve`] come after it.
fn listens() -> LockId {
    // The upper half stands for us; it fits into an oid without a sign.
    hashed("leasehold: what sessions keep for themselves, 1") & (0x7fff_ffff << 32)
}

/// Some locks of nobody's, so that there is room left in the server's lock table when it is full.
///
/// A new connection needs a few entries in that table; with none left nobody can connect, not even an
/// operator. So a session that finds the table full gives these up, and takes no more locks until it
/// has them again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reserve {
    pub(crate) pid: i32,
}

impl Reserve {
    const LOCKS: i64 = 16;

    pub(crate) fn take(self) -> String {
        self.each("pg_advisory_lock_shared")
    }

    pub(crate) fn give_up(self) -> String {
        self.each("pg_advisory_unlock_shared")
    }

    fn each(self, function: &str) -> String {
        let first = listens() + i64::from(self.pid) * Self::LOCKS;
        let last = first + Self::LOCKS - 1;
        format!(
            "SELECT pg_backend_pid(), count({function}(n)) FROM generate_series({first}, {last}) AS n"
        )
    }
}

/// A text as a literal.
pub(crate) fn literal(text: &str) -> String {
    // The E form means the same whatever standard_conforming_strings says.
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

fn nextval(sequence: &str) -> String {
    format!("nextval({}::regclass)", literal(sequence))
}

fn quoted(name: &str) -> Result<String> {
    let parts: Vec<_> = name.split('.').collect();
    let fine = |part: &&str| !part.is_empty() && part.len() <= 63 && !part.contains(['\0', '$']);
    if parts.len() != 2 || !parts.iter().all(fine) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{name:?} cannot be a sequence: name it as schema.name, as in public.leasehold_token"
            ),
        ));
    }
    let parts: Vec<_> = parts.into_iter().map(quoted_part).collect();
    Ok(parts.join("."))
}

fn quoted_part(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_is_named_with_its_schema() {
        assert_eq!(quoted("public.t").expect("fine"), "\"public\".\"t\"");
        assert_eq!(quoted("a\"b.t'").expect("fine"), "\"a\"\"b\".\"t'\"");
        for name in ["t", "", ".t", "a.b.c", "a.", "a.b\0", "a.$leasehold$"] {
            assert_eq!(quoted(name).expect_err(name).kind(), ErrorKind::Invalid);
        }
        assert_eq!(literal(r"it's \x"), r"E'it''s \\x'");
    }
}
