use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};

/// One option of a URL, as in `ttl=30s`.
#[derive(Clone)]
pub(crate) struct Setting {
    name: String,
    value: String,
    /// Whether errors may show it. Not if the text after the `?` has an `@` in it: it may be the rest
    /// of a password then.
    shown: bool,
}

impl Setting {
    /// The options in the text after the `?`; each may be given once.
    pub(crate) fn parse(query: &str) -> Result<Vec<Self>> {
        let shown = !query.contains('@');
        let mut settings: Vec<Self> = Vec::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let setting = Self {
                name: name.into_owned(),
                value: value.into_owned(),
                shown,
            };
            if settings.iter().any(|before| before.name == setting.name) {
                return Err(invalid(format!(
                    "the option {} is given twice: give it once",
                    setting.shown_name()
                )));
            }
            settings.push(setting);
        }
        Ok(settings)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The value as it is.
    pub(crate) fn text(&self) -> &str {
        &self.value
    }

    /// The value as a length of time.
    pub(crate) fn duration(&self) -> Result<Duration> {
        humantime::parse_duration(&self.value)
            .map_err(|_error| self.wrong("is no length of time: write it as 30s, 500ms or 1m30s"))
    }

    /// The value as a length of time that is not zero.
    pub(crate) fn limit(&self) -> Result<Duration> {
        let duration = self.duration()?;
        if duration.is_zero() {
            return Err(self.wrong("is no limit: give more than zero, or leave it out for none"));
        }
        Ok(duration)
    }

    /// The file that the value names.
    #[cfg(any(feature = "redis", feature = "etcd", feature = "zk"))]
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        std::fs::read(self.text())
            .map_err(|error| self.wrong(&format!("names a file that cannot be read: {error}")))
    }

    /// An error that says why the value cannot be taken.
    pub(crate) fn wrong(&self, why: &str) -> Error {
        if self.shown {
            invalid(format!("{}={} {why}", self.name, self.value))
        } else {
            // The name is one of ours by now.
            invalid(format!("the value of {} {why}", self.name))
        }
    }

    /// An error that says that there is no such option, and what there is.
    pub(crate) fn unknown(&self, scheme: &str, known: &[&str]) -> Error {
        let name = self.shown_name();
        let advice = match crate::nearest::nearest(&self.name, known.iter().copied()) {
            Some(meant) if self.shown => format!("did you mean {meant}?"),
            _ => format!("there are {}", known.join(", ")),
        };
        let hint = if self.shown {
            ""
        } else {
            "; a ? in a password is written %3F"
        };
        invalid(format!(
            "a {scheme} URL has no option {name}: {advice}{hint}"
        ))
    }

    fn shown_name(&self) -> &str {
        if self.shown { &self.name } else { "like that" }
    }
}

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}
