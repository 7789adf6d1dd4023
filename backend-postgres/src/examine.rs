//! What the server says of itself.

use std::time::{Duration, SystemTime};

use leasehold_core::{Examination, Examined, Moment, Result, Severity};
use sqlx::postgres::PgRow;
use sqlx::{Connection as _, Row as _};
use tokio::time::timeout;

use crate::PostgresOptions;
use crate::connection::{connect, one, silent};
use crate::error::explain;

/// Standbys are those that follow the server as a whole: not who copies it for a backup, nor who
/// takes single tables. Who is not a monitor sees that they are there, and not how they follow.
const QUESTION: &str = "\
    WITH standbys AS ( \
      SELECT sync_state FROM pg_stat_replication \
      WHERE state IS DISTINCT FROM 'backup' AND NOT EXISTS ( \
        SELECT FROM pg_replication_slots WHERE slot_type = 'logical' AND active_pid = pid)) \
    SELECT current_setting('server_version'), \
      (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, \
      current_setting('fsync') = 'on', \
      current_setting('max_connections'), \
      current_setting('max_locks_per_transaction'), \
      (SELECT count(*) FROM standbys), \
      (SELECT count(*) FROM standbys WHERE sync_state IS DISTINCT FROM 'sync' \
        AND sync_state IS DISTINCT FROM 'quorum')";

/// Asks it on a connection of its own.
pub(crate) async fn examine(options: &PostgresOptions, max_holds: usize) -> Result<Examination> {
    const TIMES: usize = 3;
    let asking = format!("asking {} about itself", options.address());
    let failed = |error| explain(&asking, error);
    let answers = timeout(options.connect_timeout, async {
        let mut connection = connect(options).await?;
        let mut best: Option<(Duration, PgRow)> = None;
        for _ in 0..TIMES {
            let sent = Moment::now();
            let row = one(&mut connection, QUESTION).await.map_err(failed)?;
            let taken = sent.elapsed();
            if best.as_ref().is_none_or(|(shortest, _)| taken < *shortest) {
                best = Some((taken, row));
            }
        }
        // Failing to say goodbye is no failure.
        drop(connection.close().await);
        Ok(best)
    });
    let best = answers
        .await
        .unwrap_or_else(|_elapsed| Err(silent(options, options.connect_timeout)))?;
    let mut examination = Examination::new();
    if let Some((taken, row)) = best {
        let mut server = Examined::new(options.address());
        server.fact("holds at most", max_holds);
        read(&row, taken, &mut server, &mut examination).map_err(failed)?;
        examination.servers.push(server);
    }
    Ok(examination)
}

fn read(
    row: &PgRow,
    taken: Duration,
    server: &mut Examined,
    examination: &mut Examination,
) -> sqlx::Result<()> {
    server.version = Some(row.try_get(0)?);
    server.round_trip = Some(taken);
    let since = Duration::from_micros(row.try_get::<i64, _>(1)?.unsigned_abs());
    server.clock(SystemTime::UNIX_EPOCH + since, taken);
    let synced: bool = row.try_get(2)?;
    server.fact("fsync", if synced { "on" } else { "off" });
    server.fact("max_connections", row.try_get::<String, _>(3)?);
    server.fact("max_locks_per_transaction", row.try_get::<String, _>(4)?);
    let (standbys, behind): (i64, i64) = (row.try_get(5)?, row.try_get(6)?);
    server.fact("standbys", standbys);

    let address = server.address.clone();
    if !synced {
        examination.find(
            Severity::Warning,
            "fsync-off",
            format!("{address} does not wait for its disk (fsync = off): a crash of the machine may lose the sequence that tokens come from, and with it the database"),
            "set fsync to on",
        );
    }
    if behind > 0 {
        examination.find(
            Severity::Warning,
            "asynchronous-standbys",
            format!("standbys follow {address} asynchronously ({behind} of {standbys}), and locks are not copied to any: after a failover a lock may be given to a second holder, and what was committed last may be gone"),
            "let a failover end the old primary before it promotes, and make the data that locks protect synchronous (synchronous_standby_names)",
        );
    } else if standbys > 0 {
        examination.find(
            Severity::Note,
            "standbys",
            format!("standbys follow {address} ({standbys}), but locks are not copied to them: after a failover a lock may be given to a second holder while the old primary lives"),
            "let a failover end the old primary before it promotes",
        );
    }
    Ok(())
}
