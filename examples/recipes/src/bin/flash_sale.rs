//! Ten articles and fifty buyers: docs/flash-sale.md.

use std::sync::{Arc, Mutex};

use anyhow::ensure;
use leasehold::{Locks, Token};
use tokio::task::JoinSet;

const ARTICLES: usize = 10;
const BUYERS: usize = 50;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let locks = leasehold_recipes::locks().await?;
    // A name of this run: the store may be anybody's.
    let article = format!("stock:{}", std::process::id());
    let stock = Arc::new(Stock(Mutex::new(Row {
        left: ARTICLES,
        token: None,
    })));
    let early = locks.lock(&article).await?;
    let old = early.token();
    early.release().await?;

    let mut buyers = JoinSet::new();
    for _ in 0..BUYERS {
        let (locks, article, stock) = (locks.clone(), article.clone(), stock.clone());
        buyers.spawn(async move { buy(&locks, &article, &stock).await });
    }
    let mut orders = 0;
    while let Some(sold) = buyers.join_next().await {
        orders += usize::from(sold?? == Sold::Yes);
    }
    println!("{orders} orders for {ARTICLES} articles from {BUYERS} buyers");
    ensure!(orders == ARTICLES, "{orders} orders");

    // A holder that was stopped all the while, and goes on.
    let late = stock.take_one(old).await;
    println!("the token {old}, which is over: {late:?}");
    ensure!(late == Sold::TooLate);
    locks.close().await?;
    Ok(())
}

async fn buy(locks: &Locks, article: &str, stock: &Stock) -> leasehold::Result<Sold> {
    let guard = locks.lock(article).await?; // waits its turn
    let token = guard.token();
    // Begins the transaction, takes one, creates the order, and commits.
    let sold = guard.run(stock.take_one(token)).await?;
    // Committed: only now the next one may look.
    guard.release().await?;
    Ok(sold)
}

/// Stands in for a table in a database.
struct Stock(Mutex<Row>);

struct Row {
    left: usize,
    /// The highest that has written.
    token: Option<Token>,
}

#[derive(Debug, PartialEq)]
enum Sold {
    Yes,
    NoneLeft,
    /// Somebody with a higher token was here.
    TooLate,
}

impl Stock {
    /// `UPDATE stock SET left = left - 1, token = $1 WHERE article = $2 AND token < $1 AND left > 0`,
    /// with its commit. But for the condition on the token, it reads and writes in two steps, as
    /// services do that count on their lock.
    async fn take_one(&self, token: Token) -> Sold {
        let left = {
            let row = self.row();
            if row.token.is_some_and(|seen| token <= seen) {
                return Sold::TooLate;
            }
            row.left
        };
        tokio::task::yield_now().await;
        if left == 0 {
            return Sold::NoneLeft;
        }
        *self.row() = Row {
            left: left - 1,
            token: Some(token),
        };
        Sold::Yes
    }

    fn row(&self) -> std::sync::MutexGuard<'_, Row> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
