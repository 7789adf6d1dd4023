use super::Scheme;
#[cfg(feature = "etcd")]
use super::{Address, Opening};

pub(super) const PLAIN: Scheme = Scheme {
    name: "etcd",
    form: "etcd://host,host",
    options: &["prefix", "connect_timeout"],
    feature: "etcd",
    #[cfg(feature = "etcd")]
    open: Some(open),
    #[cfg(not(feature = "etcd"))]
    open: None,
};

pub(super) const TLS: Scheme = Scheme {
    name: "etcds",
    form: "etcds://host,host",
    options: &[
        "prefix",
        "connect_timeout",
        "certificate_authority",
        "client_certificate",
        "client_key",
    ],
    ..PLAIN
};

#[cfg(feature = "etcd")]
fn open(address: Address) -> Opening {
    Box::pin(async move {
        let options = opening::options(&address)?;
        let etcd = leasehold_etcd::Etcd::connect_with(options).await?;
        Ok(Box::new(etcd) as Box<dyn leasehold_core::Backend>)
    })
}

#[cfg(feature = "etcd")]
mod opening {
    use leasehold_core::Result;
    use leasehold_etcd::EtcdOptions;
    use percent_encoding::percent_decode_str;

    use crate::schemes::Address;
    use crate::setting::invalid;

    /// The names are those of [`EtcdOptions`], and the values too, but that certificates are files.
    pub(super) fn options(address: &Address) -> Result<EtcdOptions> {
        let (user, endpoints) = parts(&address.text)?;
        let mut options = EtcdOptions::new(endpoints)?;
        if let Some((name, password)) = user {
            options = options.with_user(name, password);
        }
        if let Some(prefix) = address.setting("prefix") {
            options = options.with_prefix(prefix.text());
        }
        if let Some(timeout) = address.setting("connect_timeout") {
            options = options.with_connect_timeout(timeout.limit()?);
        }
        let certificates = address.certificates()?;
        if let Some(authority) = certificates.authority {
            options = options.with_certificate_authority(authority);
        }
        if let Some((certificate, key)) = certificates.client {
            options = options.with_client_certificate(certificate, key);
        }
        Ok(options)
    }

    type User = (String, String);

    /// `etcd://[user:password@]host[:port][,host[:port]…]`: who asks, and the members.
    pub(super) fn parts(url: &str) -> Result<(Option<User>, Vec<String>)> {
        const FORM: &str = "write it as etcd://[user:password@]host[:port][,host[:port]…]";
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| invalid(format!("an etcd: URL goes on with two slashes: {FORM}")))?;
        let scheme = if scheme.eq_ignore_ascii_case("etcds") {
            "https"
        } else {
            "http"
        };
        let (user, hosts) = match rest.rsplit_once('@') {
            Some((user, hosts)) => (Some(user), hosts),
            None => (None, rest),
        };
        let hosts = hosts.strip_suffix('/').unwrap_or(hosts);
        if hosts.contains('/') {
            return Err(invalid(
                "an etcd: URL ends with the hosts: what all keys begin with is the option prefix",
            ));
        }
        let user = match user.map(|user| user.split_once(':')) {
            None => None,
            Some(Some((name, password))) => Some((decoded(name)?, decoded(password)?)),
            Some(None) => return Err(invalid(format!("a user of etcd has a password: {FORM}"))),
        };
        let endpoints = hosts.split(',').map(|host| {
            let has_port = host
                .rsplit_once(':')
                .is_some_and(|(_, port)| !port.contains(']'));
            let port = if has_port { "" } else { ":2379" };
            format!("{scheme}://{host}{port}")
        });
        Ok((user, endpoints.collect()))
    }

    fn decoded(text: &str) -> Result<String> {
        let text = percent_decode_str(text).decode_utf8().map_err(|_error| {
            invalid("the user or password of this etcd: URL is no UTF-8 once its % are decoded")
        })?;
        Ok(text.into_owned())
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn members_and_user_are_read() {
            let (user, endpoints) = parts("etcd://a,b:1,[::1],[::2]:3/").unwrap();
            assert_eq!(user, None);
            let expected = [
                "http://a:2379",
                "http://b:1",
                "http://[::1]:2379",
                "http://[::2]:3",
            ];
            assert_eq!(endpoints, expected);
            let (user, endpoints) = parts("ETCDS://me:a%40%2f/b@h").unwrap();
            assert_eq!(user, Some(("me".into(), "a@//b".into())));
            assert_eq!(endpoints, ["https://h:2379"]);
            for bad in ["etcd:h", "etcd://me@h", "etcd://h/prefix", "etcd://%ff:a@h"] {
                assert!(parts(bad).is_err(), "{bad}");
            }
        }
    }
}
