use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Txn, TxnOp, TxnResponse};
use leasehold_core::{Batch, Gather, Way, poll_once};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::call::{self, Call, Said};
use crate::endpoints::{Channel, Endpoints};
use crate::error::{self, Cause, Failure};

/// Sends calls; those that meet travel as one transaction, so that the server writes to its disk once
/// for all of them.
///
/// 1. *Alone.* While few requests are under way, a call goes as it is, by a request of its own; the others
///    [collect](Gather).
/// 2. *Together.* What has collected is one transaction, in which each claim is a transaction of its own,
///    with its own comparison, and each deletion an operation. All comparisons are judged before
///    anything is written, so two claims on one lock never share a request: both would be granted.
/// 3. *Rights and room.* The server judges what a request may do by the operations that it names itself,
///    and does not look into nested transactions: a claim could put a key that its user may not
///    write (GHSA-rfx7-8w68-q57q), or that there is no room for. So the transaction has another
///    branch, which names all of that and is never taken; the server judges both branches.
/// 4. *Refused.* Rights, a lease that is gone, room, size: one call spoils the request for all of them, and
///    nothing of it is done. Then it goes again in two halves, and so on, until the one that is refused
///    is alone with it. (So is a request that is too large: halves are smaller.)
/// 5. *Not answered.* It is repeated by the same rules as a single one: each claim asks for its own key
///    then, and each learns that it was repeated.
/// 6. Each call has the time that it would have alone: calls of another limit are another request.
#[derive(Debug)]
pub(crate) struct Together {
    gather: Gather<Call, Reply>,
    endpoints: Arc<Endpoints>,
}

/// What came of a call.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) said: Result<Said, Failure>,
    /// An attempt was not answered: it may have been carried out, or may yet be.
    pub(crate) unanswered: bool,
    /// The only attempt was answered: nothing of this call is on the way any more.
    pub(crate) certain: bool,
}

/// How many requests are under way before calls collect: while the server waits for its disk, the next is
/// on its way. (Tried: four served 64 tasks slower, and 256 no faster; one served 256 slower.)
const REQUESTS: usize = 2;

/// How many calls travel as one request. A transaction may have 128 operations by default, counted down
/// a nested one; two for each claim in the branch that is not taken, and two in a claim.
const TOGETHER_AT_MOST: usize = 63;

impl Together {
    /// Starts the task that carries batches, on the current runtime.
    pub(crate) fn start(endpoints: Arc<Endpoints>) -> Self {
        let (sender, batches) = mpsc::unbounded_channel();
        drop(tokio::spawn(carrier(endpoints.clone(), batches)));
        // Without the task the runtime has ended, and nobody gets an answer.
        let hand_on = move |batch| drop(sender.send(batch));
        Self {
            gather: Gather::by_key(REQUESTS, TOGETHER_AT_MOST, Call::folder, hand_on),
            endpoints,
        }
    }

    /// Sends a call until it is answered, at most for its limit.
    ///
    /// It is on its way after the first poll; if this is dropped, it may still be carried out.
    pub(crate) async fn send(&self, call: Call) -> Reply {
        match self.gather.enter(|| call.clone()) {
            Way::Alone(_pass) => {
                let calls = std::slice::from_ref(&call);
                let mut replies = ask(&self.endpoints, calls, false).await.into_replies(calls);
                replies.pop().unwrap_or_else(gone)
            }
            Way::Together(answer) => answer.await.unwrap_or_else(gone),
        }
    }
}

/// Sends each batch before it looks at the next, so that they leave in order; their answers are other
/// tasks' business.
async fn carrier(
    endpoints: Arc<Endpoints>,
    mut batches: mpsc::UnboundedReceiver<Batch<Call, Reply>>,
) {
    while let Some(batch) = batches.recv().await {
        let mut carried = Box::pin(carry(endpoints.clone(), batch, false));
        if poll_once(&Handle::current(), carried.as_mut()).is_pending() {
            drop(tokio::spawn(carried));
        }
    }
}

/// Steps 2 to 6. `again`: an earlier attempt was not answered.
async fn carry(endpoints: Arc<Endpoints>, batch: Batch<Call, Reply>, again: bool) {
    let Some(limit) = batch.calls.first().map(Call::limit) else {
        return;
    };
    let count = batch.calls.len();
    let alike = batch
        .calls
        .iter()
        .filter(|call| call.limit() == limit)
        .count();
    if alike < count {
        let parts = batch.part(|call| call.limit() == limit);
        return carry_both(endpoints, parts, again).await;
    }
    let outcome = ask(&endpoints, &batch.calls, again).await;
    if outcome.is_refused() && count > 1 {
        let mut half = 0..count / 2;
        let parts = batch.part(|_| half.next().is_some());
        return carry_both(endpoints, parts, outcome.unanswered).await;
    }
    let replies = outcome.into_replies(&batch.calls);
    batch.replies.answer(replies);
}

/// Two requests at the same time.
async fn carry_both(
    endpoints: Arc<Endpoints>,
    (one, other): (Batch<Call, Reply>, Batch<Call, Reply>),
    again: bool,
) {
    // It may come back here.
    let one = Box::pin(carry(endpoints.clone(), one, again));
    let other = Box::pin(carry(endpoints, other, again));
    tokio::join!(one, other);
}

/// What came of one request.
struct Outcome {
    said: Result<Vec<Said>, Failure>,
    unanswered: bool,
    certain: bool,
}

impl Outcome {
    fn is_refused(&self) -> bool {
        self.said.as_ref().is_err_and(|failure| failure.refused)
    }

    fn into_replies(self, calls: &[Call]) -> Vec<Reply> {
        let reply = |said| Reply {
            said,
            unanswered: self.unanswered,
            certain: self.certain,
        };
        match self.said {
            Ok(said) => said.into_iter().map(|said| reply(Ok(said))).collect(),
            Err(failure) => vec![reply(Err(failure)); calls.len()],
        }
    }
}

/// One request for all of them, which have the same limit.
async fn ask(endpoints: &Endpoints, calls: &[Call], again: bool) -> Outcome {
    let limit = calls.first().map_or(Duration::ZERO, Call::limit);
    let (mut unanswered, mut attempts) = (again, 0);
    let request = |channel: Arc<Channel>, again: bool| {
        unanswered |= again;
        attempts += 1;
        async move { send(&channel, calls, again).await }
    };
    let said = endpoints.request_again(limit, again, request).await;
    let said = said.and_then(|said| {
        said.ok_or_else(|| {
            Failure::unanswered(error::unexpected("a transaction without its parts"))
        })
    });
    if let Err(failure) = &said {
        unanswered |= failure.cause == Cause::Unanswered;
    }
    Outcome {
        certain: said.is_ok() && !unanswered && attempts == 1,
        said,
        unanswered,
    }
}

/// One attempt. `None`: the answer is not one to these calls.
async fn send(
    channel: &Channel,
    calls: &[Call],
    again: bool,
) -> Result<Option<Vec<Said>>, etcd_client::Error> {
    if let [call] = calls {
        return Ok(Some(vec![call.alone(channel, again).await?]));
    }
    let answer = channel.kv.clone().txn(transaction(calls, again)).await?;
    Ok(read(calls, &answer))
}

fn transaction(calls: &[Call], again: bool) -> Txn {
    let operations: Vec<TxnOp> = calls.iter().map(|call| call.operation(again)).collect();
    let hidden: Vec<TxnOp> = calls.iter().flat_map(Call::hidden).collect();
    match calls.first() {
        Some(call) if !hidden.is_empty() => {
            let never = Txn::new().when([call.never()]);
            never.and_then(hidden).or_else(operations)
        }
        _ => Txn::new().and_then(operations),
    }
}

fn read(calls: &[Call], answer: &TxnResponse) -> Option<Vec<Said>> {
    let revision = call::revision(answer);
    let parts = answer.op_responses();
    let said = parts.iter().map(|part| Call::said(revision, part));
    let said: Vec<Said> = said.collect::<Option<_>>()?;
    (said.len() == calls.len()).then_some(said)
}

/// What carried the call has ended with the runtime: whether it was sent is not known.
fn gone() -> Reply {
    Reply {
        said: Err(Failure::unanswered(error::ended())),
        unanswered: true,
        certain: false,
    }
}
