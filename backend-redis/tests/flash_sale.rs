//! A flash sale: 500 buyers in 8 processes, 10 items. Each buyer reads the stock, looks whether there
//! is any, and writes the new stock and the order: three requests that nothing holds together but the
//! lock. The same program without the lock sells more than there is.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod support;

use std::process::{Child, Command, Stdio};

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::Locks;
use leasehold_redis::Redis;
use redis::AsyncTypedCommands as _;
use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;

const ITEMS: usize = 10;
const BUYERS: usize = 500;
const PROCESSES: usize = 8;

/// Tells a process of this binary that it is one of the eight: the server, how many buyers, and
/// whether they lock.
const SALE: &str = "LEASEHOLD_FLASH_SALE";

#[tokio::test(flavor = "multi_thread")]
async fn under_the_lock_exactly_the_stock_is_sold_and_nothing_is_left_behind() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let mut left = sell("locked").await;
    assert_eq!(left.orders, ITEMS);
    assert_eq!(left.stock, 0);
    left.keys.sort();
    assert_eq!(left.keys, ["lock:leasehold:token", "orders", "stock"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_lock_it_oversells() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let left = sell("unlocked").await;
    assert!(left.orders > ITEMS, "only {} orders", left.orders);
}

struct Left {
    stock: usize,
    orders: usize,
    keys: Vec<String>,
}

async fn sell(how: &str) -> Left {
    let server = RedisServer::start([""; 0]).await.unwrap();
    let mut store = connect(&server.url()).await;
    store.set("stock", ITEMS).await.unwrap();
    store.set("orders", 0).await.unwrap();

    let processes: Vec<Child> = (0..PROCESSES)
        .map(|n| {
            let buyers = BUYERS / PROCESSES + usize::from(n < BUYERS % PROCESSES);
            Command::new(std::env::current_exe().unwrap())
                .args(["process_of_the_sale", "--exact", "--nocapture"])
                .env(SALE, format!("{} {buyers} {how}", server.url()))
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut process in processes {
        assert!(process.wait().unwrap().success());
    }

    let number = |text: Option<String>| text.unwrap().parse().unwrap();
    Left {
        stock: number(store.get("stock").await.unwrap()),
        orders: number(store.get("orders").await.unwrap()),
        keys: store.keys("*").await.unwrap(),
    }
}

/// Not a test by itself: what each of the processes does.
#[tokio::test(flavor = "multi_thread")]
async fn process_of_the_sale() {
    let Ok(sale) = std::env::var(SALE) else {
        return;
    };
    let [url, buyers, how] = sale.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{SALE}={sale}");
    };
    let store = connect(url).await;
    let locks = Locks::new(Redis::connect(url).await.unwrap());
    let mut running = JoinSet::new();
    for _ in 0..buyers.parse().unwrap() {
        let (mut store, locks, locked) = (store.clone(), locks.clone(), how == "locked");
        running.spawn(async move {
            if locked {
                let guard = locks.lock("flash-sale").await.unwrap();
                guard.run(buy(&mut store)).await.unwrap();
                guard.release().await.unwrap();
            } else {
                buy(&mut store).await;
            }
        });
    }
    running.join_all().await;
    locks.close().await.unwrap();
}

async fn buy(store: &mut MultiplexedConnection) {
    let stock: usize = store.get("stock").await.unwrap().unwrap().parse().unwrap();
    if stock > 0 {
        store.set("stock", stock - 1).await.unwrap();
        store.incr("orders", 1).await.unwrap();
    }
}

async fn connect(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).unwrap();
    support::patient(&client).await.unwrap()
}
