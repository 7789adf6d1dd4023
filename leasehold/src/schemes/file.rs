use super::Scheme;

pub(super) const SCHEME: Scheme = Scheme {
    name: "file",
    form: "file:/folder",
    options: &[],
    feature: "file",
    #[cfg(feature = "file")]
    open: Some(|address| Box::pin(std::future::ready(opening::open(&address.text)))),
    #[cfg(not(feature = "file"))]
    open: None,
};

#[cfg(feature = "file")]
mod opening {
    use std::path::PathBuf;

    use leasehold_core::{Backend, Result};
    use leasehold_file::Folder;
    use percent_encoding::percent_decode_str;

    use crate::setting::invalid;

    pub(super) fn open(url: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(Folder::open(folder(url)?)?))
    }

    /// `file:/folder`, `file:///folder` or `file://localhost/folder`. Unlike a browser it takes the
    /// path as it is, but for what is percent-encoded.
    pub(super) fn folder(url: &str) -> Result<PathBuf> {
        let rest = url.split_once(':').map_or("", |(_, rest)| rest);
        let path = match rest.strip_prefix("//") {
            None => rest,
            Some(rest) => {
                let (host, _) = rest.split_once('/').unwrap_or((rest, ""));
                if !host.is_empty() && !host.eq_ignore_ascii_case("localhost") {
                    return Err(invalid(
                        "a file: URL names a folder of this machine, from the root on: write \
                         file:/folder, or file:///folder, without a host",
                    ));
                }
                &rest[host.len()..]
            }
        };
        if !path.starts_with('/') {
            return Err(invalid(
                "a file: URL names its folder from the root on, as in file:/var/lib/myapp/locks",
            ));
        }
        let path = percent_decode_str(path).decode_utf8().map_err(|_error| {
            invalid("the folder of this file: URL is no UTF-8 once its % are decoded")
        })?;
        // `file:/C:/locks`
        let path = if cfg!(windows) { &path[1..] } else { &path };
        Ok(PathBuf::from(path))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        #[cfg(unix)]
        fn folders_are_taken_as_they_are() {
            for (url, path) in [
                ("file:/a", "/a"),
                ("file:///a", "/a"),
                ("file://localhost/a/b", "/a/b"),
                ("FILE:/a b/c", "/a b/c"),
                ("file:/a%20b/%c3%a4/100%25%3F", "/a b/ä/100%?"),
                ("file:/a/../B/", "/a/../B/"),
                ("file:/a+b", "/a+b"),
            ] {
                assert_eq!(folder(url).unwrap(), PathBuf::from(path), "{url}");
            }
        }
    }
}
