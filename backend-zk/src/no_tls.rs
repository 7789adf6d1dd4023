use std::sync::OnceLock;

use leasehold_core::{Error, ErrorKind, Result};
use zookeeper_client::Connector;

use crate::options::Server;

/// In place of `tls.rs` where the feature `tls` is off: there is none.
#[derive(Clone)]
pub(crate) enum Tls {}

impl Tls {
    pub(crate) fn new(
        _servers: Vec<Server>,
        _authority: Option<&[u8]>,
        _identity: Option<(&[u8], &[u8])>,
    ) -> Result<Self> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this program was built without TLS for ZooKeeper: turn on the feature `tls` of the crate \
             leasehold-zk, or `zk-tls` of the crate leasehold",
        ))
    }

    pub(crate) fn secure(&self, _connector: Connector) -> Connector {
        match *self {}
    }

    pub(crate) async fn refusal(&self, _heard: &OnceLock<String>) -> String {
        match *self {}
    }
}
