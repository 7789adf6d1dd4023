//! The scripts on a real server do what the nodes of the model do.

use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Claim, Key};
use uuid::Uuid;

use super::super::node::{Ask, Attempt, Node, Tell, Vote};
use super::super::remote::RemoteNode;
use super::super::time::{SystemTimes, Time};
use super::super::tokens::DAY;
use super::node::Store;
use crate::RedisOptions;
use crate::client::Client;

const TTL: Duration = Duration::from_secs(3600);
const STEPS: usize = 3_000;

#[tokio::test]
async fn scripts_and_model_answer_the_same() {
    let seed: u64 = match std::env::var("LEASEHOLD_SEED") {
        Ok(seed) => seed.parse().expect("LEASEHOLD_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    println!("LEASEHOLD_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let server = RedisServer::start([""; 0]).await.unwrap();
    let client = Client::new(&RedisOptions::new(server.url()).unwrap(), None).unwrap();
    let node = RemoteNode::new(client.clone(), Duration::from_secs(60), Arc::default());
    node.connect().await.unwrap();
    let mut store = Store::default();
    let mut claim = Claim::new(Key::new("k").unwrap(), TTL).unwrap();
    claim.request_limit = Duration::from_secs(60);
    let claims: Vec<Uuid> = (0..3).map(|_| Uuid::new_v4()).collect();
    let ttl = u64::try_from(TTL.as_micros()).unwrap();
    let mut granted = 0;

    for step in 0..STEPS {
        let attempt = Attempt {
            key: claim.key.clone(),
            claim: claims[rng.usize(..claims.len())],
            number: rng.u32(1..6),
        };
        claim.id = attempt.claim;
        let id = (attempt.claim, attempt.number);
        let clock = SystemTimes.clock();
        let mut proposal = rng.u64(1..1_000);
        if rng.u8(..20) == 0 {
            proposal = clock + 2 * DAY;
        }
        let ask = Ask {
            attempt: &attempt,
            claim: &claim,
            proposal,
        };
        match rng.u8(..10) {
            0..4 => {
                let real = node.acquire(&ask).await.unwrap();
                let model = store.acquire(0, clock, id, proposal, ttl);
                granted += u32::from(matches!(model, Vote::Granted { .. }));
                assert_eq!(
                    comparable(real),
                    comparable(model),
                    "acquire in step {step}"
                );
            }
            4 => {
                let real = node.raise(&ask, proposal % 2_000).await.unwrap();
                let model = store.raise(0, id, proposal % 2_000);
                assert_eq!(real, model, "raise in step {step}");
            }
            5 => {
                let real = node.extend(&attempt, TTL).await.unwrap();
                assert_eq!(real, store.extend(0, id, ttl), "extend in step {step}");
            }
            6..8 => {
                let real = node.free(&attempt, TTL, Tell::Waiters).await.unwrap();
                assert_eq!(real, store.free(0, id, ttl), "free in step {step}");
            }
            8 if rng.u8(..10) == 0 => {
                let connection = client.connection().await.unwrap();
                let flushed = connection.ask::<()>(&redis::cmd("FLUSHALL")).await;
                flushed.unwrap();
                store.flush();
            }
            _ => {
                let (real, model) = (node.look().await.unwrap(), store.look(0));
                assert_eq!(real.token, model.token, "look in step {step}");
                let marked = (real.waiting.is_some(), model.waiting.is_some());
                assert_eq!(marked.0, marked.1, "look in step {step}");
                if model.token.is_some() {
                    continue;
                }
                if rng.bool() {
                    node.mark(&real).await.unwrap();
                    store.mark(0, &model.state);
                    // No longer as it was seen.
                    assert!(node.seed(&real, 5).await.is_err());
                } else {
                    node.seed(&real, 5).await.unwrap();
                    store.seed(&model.state, 5);
                }
            }
        }
    }
    assert!(granted > 50, "{granted}");
}

/// The name of the one who has the vote is the node's own.
fn comparable(vote: Vote) -> Vote {
    match vote {
        Vote::Held { known, .. } => Vote::Held {
            known,
            by: String::new(),
            left: None,
        },
        vote => vote,
    }
}
