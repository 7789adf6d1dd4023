//! Removing all that there is under a prefix.

use std::sync::Arc;

use leasehold_core::{Error, ErrorKind, Result};
use redis::{RedisError, pipe};

use crate::client::Client;
use crate::connection::Connection;

/// Removes the keys on the server of `client`. Looks until there is nothing: what was on its way may
/// arrive meanwhile.
pub(crate) async fn erase(client: &Arc<Client>) -> Result<()> {
    const LOOKS: usize = 10;
    let prefix = client.names.prefix();
    if prefix.is_empty() {
        return Err(Error::new(
            ErrorKind::Invalid,
            "without a prefix everything on the server would be removed: give one",
        ));
    }
    let pattern = format!("{}*", literal(prefix));
    let connection = client.connection().await?;
    for _ in 0..LOOKS {
        let removed = remove_once(&connection, &pattern).await;
        if removed.map_err(|e| client.refused(&e, "+scan +del"))? == 0 {
            return Ok(());
        }
    }
    Err(Error::new(
        ErrorKind::Unavailable,
        format!(
            "others are still writing under {prefix} at {}",
            client.address
        ),
    ))
}

/// How many keys were seen.
async fn remove_once(connection: &Connection, pattern: &str) -> Result<usize, RedisError> {
    let (mut cursor, mut seen) = (0, 0);
    loop {
        let scan = redis::cmd("SCAN")
            .arg(cursor)
            .arg(&["MATCH", pattern, "COUNT", "1000"])
            .to_owned();
        let (next, keys): (u64, Vec<Vec<u8>>) = connection.ask(&scan).await?;
        seen += keys.len();
        if !keys.is_empty() {
            // Each by itself: in a cluster they lie in different slots.
            let mut removing = pipe();
            for key in &keys {
                removing.del(key);
            }
            for removed in connection.ask_all(&removing, keys.len()).await? {
                removed.extract_error()?;
            }
        }
        if next == 0 {
            return Ok(seen);
        }
        cursor = next;
    }
}

/// A pattern that only `text` matches.
fn literal(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for char in text.chars() {
        if matches!(char, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(char);
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_stands_for_itself() {
        assert_eq!(literal("lock:"), "lock:");
        assert_eq!(literal("a*[b]?\\"), "a\\*\\[b\\]\\?\\\\");
    }
}
