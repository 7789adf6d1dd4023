use super::Scheme;
#[cfg(feature = "redis")]
use super::{Address, Opening};

pub(super) const SCHEME: Scheme = Scheme {
    name: "redlock",
    form: "redlock://host,host,host",
    options: &["prefix", "connect_timeout", "max_ttl", "node_timeout"],
    feature: "redis",
    #[cfg(feature = "redis")]
    open: Some(open),
    #[cfg(not(feature = "redis"))]
    open: None,
};

#[cfg(feature = "redis")]
fn open(address: Address) -> Opening {
    Box::pin(async move {
        let options = opening::options(&address)?;
        let redlock = leasehold_redis::Redlock::connect_with(options).await?;
        Ok(Box::new(redlock) as Box<dyn leasehold_core::Backend>)
    })
}

#[cfg(feature = "redis")]
mod opening {
    use leasehold_core::Result;
    use leasehold_redis::RedlockOptions;

    use crate::schemes::Address;

    /// The names are those of [`RedlockOptions`]; user, password and database are the same on all
    /// nodes.
    pub(super) fn options(address: &Address) -> Result<RedlockOptions> {
        let mut options = RedlockOptions::new(nodes(&address.text))?;
        if let Some(prefix) = address.setting("prefix") {
            options = options.with_prefix(prefix.text());
        }
        if let Some(timeout) = address.setting("connect_timeout") {
            options = options.with_connect_timeout(timeout.limit()?);
        }
        if let Some(longest) = address.setting("max_ttl") {
            options = options.with_max_ttl(longest.limit()?);
        }
        if let Some(timeout) = address.setting("node_timeout") {
            options = options.with_node_timeout(timeout.limit()?);
        }
        Ok(options)
    }

    /// The URL of each node in `redlock://[user[:password]@]host[:port],…[/database]`.
    fn nodes(text: &str) -> Vec<String> {
        let rest = text.split_once("://").map_or("", |(_, rest)| rest);
        // A comma, a slash and an @ in a password are percent-encoded.
        let (user, rest) = match rest.rsplit_once('@') {
            Some((user, rest)) => (format!("{user}@"), rest),
            None => (String::new(), rest),
        };
        let (hosts, database) = rest.split_once('/').unwrap_or((rest, ""));
        hosts
            .split(',')
            .map(|host| format!("redis://{user}{host}/{database}"))
            .collect()
    }

    #[cfg(test)]
    mod tests {
        use super::nodes;

        #[test]
        fn each_node_has_a_url_of_its_own() {
            assert_eq!(nodes("redlock://a"), ["redis://a/"]);
            assert_eq!(
                nodes("redlock://me:p%40x@a,b:1,[::1]:2/3"),
                [
                    "redis://me:p%40x@a/3",
                    "redis://me:p%40x@b:1/3",
                    "redis://me:p%40x@[::1]:2/3"
                ]
            );
        }
    }
}
