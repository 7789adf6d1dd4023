use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use crate::{Error, ErrorKind, Result};

/// What is locked: any non-empty UTF-8 text of at most 1 KiB (see C6).
///
/// The text is taken as it is: no trimming, no case folding, no Unicode normalisation. Two
/// different texts are two different locks on every backend. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// The longest key, in bytes of UTF-8.
    pub const MAX_LEN: usize = 1024;

    /// Checks `text` and makes it a key.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if `text` is empty or longer than [`Key::MAX_LEN`] bytes.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        if text.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "the key is empty: name what is to be locked",
            ));
        }
        if text.len() > Self::MAX_LEN {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the key has {} bytes, at most {} are allowed: lock a digest of it instead",
                    text.len(),
                    Self::MAX_LEN
                ),
            ));
        }
        Ok(Self(text.into()))
    }

    /// The text of the key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Key {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_up_to_the_limit_is_a_key() {
        for text in ["a", " ", "a/b", "日本語", "\0", &"x".repeat(Key::MAX_LEN)] {
            assert_eq!(Key::new(text).unwrap().as_str(), text);
        }
        for text in ["", &"x".repeat(Key::MAX_LEN + 1)] {
            assert_eq!(Key::new(text).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
