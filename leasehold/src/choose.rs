use leasehold_core::{Error, ErrorKind, Locks, Need, Result};

use crate::open::{self, open};
use crate::setting::invalid;

/// Opens the first of the stores at `urls` that promises all of `needs`.
///
/// They are tried in the order in which they are given; those that lack something are closed again.
/// What a store promises may depend on its servers, so each is connected to. All URLs are read before
/// anything is sent.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// use leasehold::{Need, choose};
///
/// # let folder = std::env::temp_dir().join(format!("leasehold-doc-{}", std::process::id()));
/// # let file = format!("file:{}", folder.display());
/// # let file = file.as_str();
/// // let file = "file:/var/lib/shop/locks";
/// let locks = choose([Need::Order, Need::Push], [file, "memory:"]).await?;
/// assert_eq!(locks.guarantees(), leasehold::Memory::GUARANTEES);
///
/// let error = choose([Need::Consensus], [file, "memory:"]).await.unwrap_err();
/// assert!(error.to_string().contains("memory: lacks consensus (one node decides)"));
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// - [`ErrorKind::Invalid`] for a wrong URL, or none at all, before anything is sent.
/// - If none will do, an error that says for each what is missing:
///   [`ErrorKind::Unavailable`] if one of them was not reached, so that it may do later,
///   [`ErrorKind::Unsupported`] otherwise. User names and passwords are not shown.
///
/// # Cancel safety
/// Nothing is held yet; a connection that was begun is closed.
pub async fn choose(
    needs: impl IntoIterator<Item = Need> + Send,
    urls: impl IntoIterator<Item = impl AsRef<str>> + Send,
) -> Result<Locks> {
    let needs: Vec<Need> = needs.into_iter().collect();
    let urls: Vec<String> = urls
        .into_iter()
        .map(|url| url.as_ref().to_owned())
        .collect();
    for (number, url) in (1..).zip(&urls) {
        if let Err(error) = open::check(url) {
            return Err(invalid(format!(
                "store {number} of {}: {error}",
                urls.len()
            )));
        }
    }
    let mut missing = Vec::new();
    let mut kind = None;
    for url in &urls {
        let (found, why) = match open(url).await {
            Ok(locks) => match lacks(&needs, &locks) {
                None => return Ok(locks),
                Some(lacks) => {
                    // Nothing is held: what cannot be given back ends by itself.
                    let _closed = locks.close().await;
                    (ErrorKind::Unsupported, format!("lacks {lacks}"))
                }
            },
            Err(error) => (error.kind(), error.to_string()),
        };
        missing.push(format!("{} {why}", shown(url)));
        kind = Some(worse(kind, found));
    }
    let Some(kind) = kind else {
        return Err(invalid(
            "there is no store to choose from: give at least one URL",
        ));
    };
    Err(Error::new(
        kind,
        format!("no store does what is needed: {}", missing.join("; ")),
    ))
}

/// A URL as it may be shown to everybody: without user, password and options.
///
/// ```
/// let url = "redis://shop:s3cret@redis-1:6379/2?prefix=shop:";
/// assert_eq!(leasehold::shown(url), "redis://redis-1:6379/2");
/// assert_eq!(leasehold::shown("memory:"), "memory:");
/// ```
#[must_use]
pub fn shown(url: &str) -> String {
    let url = url.trim();
    let Some((scheme, rest)) = url.split_once(':') else {
        return "a store".into();
    };
    // What stands before the last @ may be a password, with whatever in it.
    let (begin, rest) = match rest.rsplit_once('@') {
        Some((_, rest)) => ("//", rest),
        None => ("", rest),
    };
    let end = rest.find(['?', '#']).unwrap_or(rest.len());
    format!("{scheme}:{begin}{}", &rest[..end])
}

fn lacks(needs: &[Need], locks: &Locks) -> Option<String> {
    let guarantees = locks.guarantees();
    let lacks: Vec<String> = needs
        .iter()
        .filter_map(|need| {
            let reason = need.check(&guarantees).err()?;
            Some(format!("{need} ({reason})"))
        })
        .collect();
    (!lacks.is_empty()).then(|| lacks.join(", "))
}

/// Whoever can be reached later may do; whoever lacks something will not.
fn worse(before: Option<ErrorKind>, now: ErrorKind) -> ErrorKind {
    match (before, now) {
        (Some(ErrorKind::Unavailable), _) | (_, ErrorKind::Unavailable) => ErrorKind::Unavailable,
        (Some(ErrorKind::Unsupported), _) => ErrorKind::Unsupported,
        (_, now) => now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_not_shown() {
        for url in [
            "redis://hunter2:hunter2@host",
            "redis://me:hunter2@host/1?prefix=a",
            "redis://me:pass?hunter2@host",
            "redis://me:pass/hunter2@host",
            "redis://me:pass#hunter2@host",
            "redis://me:p@hunter2@host",
            "postgres://host/db?password=hunter2",
            "hunter2",
        ] {
            assert!(!shown(url).contains("hunter2"), "{url}: {}", shown(url));
        }
        assert_eq!(shown("etcd://u:p@a:1,b:2?ttl=1s"), "etcd://a:1,b:2");
        assert_eq!(shown("file:/var/lib/locks?wait=1s"), "file:/var/lib/locks");
    }
}
