//! Removing all that there is under a prefix.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Moment, Result};
use tokio::time::{sleep, timeout};
use zookeeper_client::{Client, Error as Failure};

use crate::error;
use crate::options::ZooKeeperOptions;
use crate::session::Answer;

/// Removes the node of the prefix, and all below it. In a session that has no node of its own there, for
/// that would come back.
pub(crate) async fn erase(options: &Arc<ZooKeeperOptions>) -> Result<()> {
    const PAUSE: Duration = Duration::from_millis(20);
    let root = options.root();
    let limit = options.connect_timeout();
    let started = Moment::now();
    let erasing = async {
        let connector = options.connector(limit);
        let client = connector.connect(&options.connect_string()).await?;
        loop {
            match remove(&client, &root).await {
                // Somebody may have come in between.
                Err(Failure::NotEmpty) if started.elapsed() < limit => sleep(PAUSE).await,
                answer => return answer,
            }
        }
    };
    let answer: Answer<()> = timeout(2 * limit, erasing)
        .await
        .unwrap_or(Err(Failure::Timeout));
    answer.map_err(|error| error::map(options.servers(), &error))
}

/// From the leaves on.
async fn remove(client: &Client, path: &str) -> Answer<()> {
    let children = match client.list_children(path).await {
        Err(Failure::NoNode) => return Ok(()),
        children => children?,
    };
    for child in children {
        Box::pin(remove(client, &format!("{path}/{child}"))).await?;
    }
    match client.delete(path, None).await {
        // Others remove theirs too, and the servers sweep empty folders.
        Ok(()) | Err(Failure::NoNode) => Ok(()),
        Err(error) => Err(error),
    }
}
