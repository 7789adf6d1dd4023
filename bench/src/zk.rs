use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_core::Locks;
use leasehold_zk::ZooKeeper;
use zookeeper_client::{Acls, Client, CreateMode};

use crate::measure::{Plan, Rate, runtime};

/// A free lock with several tasks on keys of their own over one client; one server, which writes to
/// the disk as servers do.
pub fn run(plan: Plan) {
    runtime().block_on(async {
        let server = ZooKeeperEnsemble::start_with_sync(1)
            .await
            .expect("ZooKeeper starts");
        let servers = server.servers();
        warm_up(plan, &servers).await;
        for tasks in [1, 64] {
            let case = format!("zk, free lock, {tasks} tasks");
            plan.compare(
                &case,
                async || floor(plan, &servers, tasks).await,
                async || plan.free(locks(&servers).await, tasks).await,
            )
            .await;
        }
    });
}

/// Java compiles what runs often, so a new server is slow.
async fn warm_up(plan: Plan, servers: &str) {
    floor(plan, servers, 64).await;
    plan.free(locks(servers).await, 64).await;
}

/// The raw client without a lock library: create, list and delete, one after the other.
async fn floor(plan: Plan, servers: &str, tasks: usize) -> Rate {
    let client = Client::connect(servers).await.expect("the server answers");
    let folder = CreateMode::Persistent.with_acls(Acls::anyone_all());
    for task in 0..tasks {
        let made = client.mkdir(&format!("/floor/{task}"), &folder).await;
        made.expect("the server answers");
    }
    plan.measure(tasks, move |task| {
        let client = client.clone();
        async move {
            let parent = format!("/floor/{task}");
            let path = format!("{parent}/lock-");
            let place = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
            let created = client.create(&path, b"", &place).await;
            let (_, sequence) = created.expect("the server answers");
            let children = client.list_children(&parent).await;
            assert_eq!(children.expect("the server answers").len(), 1, "free");
            let deleted = client.delete(&format!("{path}{sequence}"), None).await;
            deleted.expect("ours");
        }
    })
    .await
}

async fn locks(servers: &str) -> Locks {
    let client = ZooKeeper::connect(format!("zk://{servers}")).await;
    Locks::new(client.expect("the server answers"))
}
