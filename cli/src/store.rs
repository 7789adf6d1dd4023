use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use leasehold::Locks;
use tokio::runtime::{Builder, Runtime};

use crate::cli::StoreArgs;
use crate::exit::{Exit, Failure};

impl StoreArgs {
    /// Opens the store that the user named, or the user's own folder.
    ///
    /// # Errors
    /// What [`leasehold::open`] says, or that there is no such folder.
    pub(crate) async fn open(&self) -> Result<Locks, Failure> {
        Ok(leasehold::open(&self.url()?).await?)
    }

    /// Its URL.
    ///
    /// # Errors
    /// If the user named none, and has no folder either.
    pub(crate) fn url(&self) -> Result<String, Failure> {
        match self.url.as_deref() {
            Some(url) if !url.is_empty() => Ok(url.to_owned()),
            _ => default_url(),
        }
    }
}

/// One thread does it all: it also starts the command, and the kernel ties the command's life to the
/// thread that started it.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start: {error}")))
}

fn default_url() -> Result<String, Failure> {
    let folder = state_folder(env::var_os("XDG_STATE_HOME"), env::home_dir()).ok_or_else(|| {
        Failure::new(
            Exit::Failed,
            "no home folder to keep locks in: set XDG_STATE_HOME, or name a store with LEASEHOLD_URL or --url",
        )
    })?;
    file_url(&folder).map_err(|error| {
        Failure::new(
            Exit::Failed,
            format!("cannot keep locks in {}: {error}", folder.display()),
        )
    })
}

/// Where the XDG base directory specification keeps a program's state: in `$XDG_STATE_HOME`, or in
/// `.local/state` of the home folder. It wants relative paths ignored.
fn state_folder(xdg: Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    xdg.map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| {
            home.filter(|path| path.is_absolute())
                .map(|home| home.join(".local/state"))
        })
        .map(|state| state.join("leasehold"))
}

/// `folder` as the URL of the file backend: what has a meaning in a URL is percent-encoded.
fn file_url(folder: &Path) -> io::Result<String> {
    let text = folder.to_str().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "its name is not valid UTF-8")
    })?;
    let mut url = String::from("file:");
    for c in text.chars() {
        if matches!(c, '%' | '?' | '#') || c.is_control() || c == ' ' {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                url.push_str(&format!("%{byte:02X}"));
            }
        } else {
            url.push(c);
        }
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_folder_follows_the_xdg_specification() {
        let home = || Some(PathBuf::from("/home/ann"));
        let cases = [
            (Some("/state"), home(), Some("/state/leasehold")),
            (None, home(), Some("/home/ann/.local/state/leasehold")),
            (
                Some("relative"),
                home(),
                Some("/home/ann/.local/state/leasehold"),
            ),
            (Some(""), home(), Some("/home/ann/.local/state/leasehold")),
            (Some("/state"), None, Some("/state/leasehold")),
            (None, Some(PathBuf::new()), None),
            (None, None, None),
        ];
        for (xdg, home, expected) in cases {
            let folder = state_folder(xdg.map(Into::into), home.clone());
            assert_eq!(folder, expected.map(Into::into), "{xdg:?} {home:?}");
        }
    }

    #[test]
    fn file_url_encodes_what_a_url_takes_apart() {
        let url = file_url(Path::new("/a b/50%?#/ü")).unwrap();
        assert_eq!(url, "file:/a%20b/50%25%3F%23/ü");
    }
}
