use leasehold_core::{Backend, Error, ErrorKind, Locks, Result};

use crate::nearest::nearest;
use crate::options;
use crate::schemes::{Address, Opening, SCHEMES, Scheme};
use crate::setting::{Setting, invalid};

/// Opens the store that `url` names, with the options that follow its `?`.
///
/// Which URLs there are, and which options: see the [crate's page](crate#opening-by-url). Nothing is
/// sent before the whole of the URL is understood. No error shows a user name or password.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let locks = leasehold::open("memory:?ttl=10s&wait=500ms&label=nightly+import").await?;
/// let guard = locks.lock("order:42").await?;
/// let holder = locks.holder("order:42").await?;
/// assert_eq!(holder.and_then(|it| it.label).as_deref(), Some("nightly import"));
///
/// let error = leasehold::open("memory:?tll=10s").await.unwrap_err();
/// assert_eq!(error.to_string(), "a memory: URL has no option tll: did you mean ttl?");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// - [`ErrorKind::Invalid`] if the URL or one of its options is wrong; the message says what is right.
/// - [`ErrorKind::Unsupported`] if the feature of this store is off; the message names it.
/// - Whatever the store says when it is opened: [`ErrorKind::Unavailable`] if it is not reached.
///
/// # Cancel safety
/// Nothing is held yet; a connection that was begun is closed.
pub async fn open(url: impl AsRef<str> + Send) -> Result<Locks> {
    let (opening, settings) = opening(url.as_ref())?;
    drop(url);
    options::apply(Locks::new(opening.await?), &settings)
}

/// Connects to the store that `url` names as [`open`](crate::open()) does, but gives back the backend itself, for
/// tools that are no users of locks. The options of [`Locks`](crate::Locks) in it are read, and have no
/// effect.
///
/// # Errors
/// As [`open`](crate::open()).
///
/// # Cancel safety
/// As [`open`](crate::open()).
pub async fn connect(url: impl AsRef<str> + Send) -> Result<Box<dyn Backend>> {
    let (opening, _) = opening(url.as_ref())?;
    drop(url);
    opening.await
}

/// Nothing is sent before it is polled.
fn opening(url: &str) -> Result<(Opening, Vec<Setting>)> {
    let (scheme, address, settings) = parse(url)?;
    let Some(open) = scheme.open else {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "this program was built without {}: stores: turn on the feature `{}` of the crate \
                 leasehold",
                scheme.name, scheme.feature
            ),
        ));
    };
    Ok((open(address), settings))
}

/// Whether `url` is understood; what only the store knows how to read is not looked at.
pub(crate) fn check(url: &str) -> Result<()> {
    parse(url).map(drop)
}

/// The store, what the URL says to it, and the options of [`Locks`].
fn parse(url: &str) -> Result<(&'static Scheme, Address, Vec<Setting>)> {
    let url = url.trim();
    let scheme = find(url)?;
    let (text, query) = url.split_once('?').unwrap_or((url, ""));
    if url.contains('#') {
        return Err(invalid(
            "a URL of a store has no part after #: a # that belongs to a name or password is written \
             %23",
        ));
    }

    let known: Vec<&str> = options::names()
        .chain(scheme.options.iter().copied())
        .collect();
    let settings = Setting::parse(query)?;
    if let Some(unknown) = settings.iter().find(|it| !known.contains(&it.name())) {
        return Err(unknown.unknown(&format!("{}:", scheme.name), &known));
    }
    options::check(&settings)?;
    let (own, general) = settings
        .into_iter()
        .partition(|it| scheme.options.contains(&it.name()));
    let address = Address {
        text: text.to_owned(),
        settings: own,
    };
    Ok((scheme, address, general))
}

fn find(url: &str) -> Result<&'static Scheme> {
    let forms: Vec<&str> = SCHEMES.iter().map(|scheme| scheme.form).collect();
    let forms = forms.join(", ");
    let Some((name, _)) = url.split_once(':') else {
        return Err(invalid(format!(
            "this is no URL of a store, which looks like one of {forms}"
        )));
    };
    let found = SCHEMES
        .iter()
        .find(|scheme| scheme.name.eq_ignore_ascii_case(name));
    found.ok_or_else(|| {
        // What stands before the colon may be a user name.
        let shown = if url.contains('@') || !is_scheme(name) {
            "this kind of store is not known".to_owned()
        } else {
            format!("{name}: stores are not known")
        };
        let advice = match nearest(name, SCHEMES.iter().map(|scheme| scheme.name)) {
            Some(meant) => format!("did you mean {meant}:?"),
            None => format!("there are {forms}"),
        };
        invalid(format!("{shown}: {advice}"))
    })
}

fn is_scheme(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name
            .chars()
            .all(|it| it.is_ascii_alphanumeric() || matches!(it, '+' | '-' | '.'))
}
