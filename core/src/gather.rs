use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Sleep, sleep};

/// Lets calls of one client that meet travel together, as databases commit in groups. For backends whose
/// store can answer many calls in one request, each for itself.
///
/// 1. *Alone.* While fewer than a given number of requests are under way, a call goes straight, as a
///    request of its own: nobody waits for company.
/// 2. *Together.* The calls that come while so many are under way collect, in order. As soon as one of
///    those requests has ended, however that was, they leave as one request, as many as fit; where the
///    store needs it, [no two on one key](Self::by_key).
/// 3. *In order.* No call leaves before one that came earlier, also where two requests are under way or
///    two threads are at it: whoever hands a request on has handed it on before the next may go. (Else
///    the withdrawal of a claim might overtake the claim.)
/// 4. *Whatever collected leaves*, also when the caller's future is dropped: it is on its way from the
///    moment it was [entered](Self::enter).
/// 5. *Nobody is held up for long.* A call that went straight is under way until its future has seen the
///    answer, and whoever has that future may leave it alone, as a `select!` does while it is busy with
///    another. So a call that is waited for and has collected for a while leaves all the same, with those
///    before it.
///
/// This is the group commit of `DeWitt` et al., "Implementation techniques for main memory database
/// systems" (1984), without its timer: the request under way is what is waited for.
pub struct Gather<C, A>(Arc<Shared<C, A>>);

struct Shared<C, A> {
    most_requests: usize,
    /// How many of those that have collected leave as one, from the first on: one at least.
    fit: Box<dyn Fn(&Collected<C, A>) -> usize + Send + Sync>,
    queue: Mutex<Queue<C, A>>,
    send: Box<dyn Fn(Batch<C, A>) + Send + Sync>,
}

struct Queue<C, A> {
    under_way: usize,
    /// Somebody is handing a request on: all others queue.
    handing_on: bool,
    calls: Collected<C, A>,
}

type Collected<C, A> = VecDeque<(C, oneshot::Sender<A>)>;

/// How a call travels.
#[derive(Debug)]
pub enum Way<C, A> {
    /// By itself: the caller sends it now, and drops the pass when it has its answer.
    Alone(Pass<C, A>),
    /// With others: the answer will come.
    Together(Answer<C, A>),
}

/// Counts as a request under way until it is dropped.
pub struct Pass<C, A>(Arc<Shared<C, A>>);

/// Calls that leave as one request, in order.
#[derive(Debug)]
pub struct Batch<C, A> {
    /// The calls.
    pub calls: Vec<C>,
    /// Where their answers go.
    pub replies: Replies<C, A>,
}

/// Where the answers of a [`Batch`] go. If it is dropped, nobody gets one.
pub struct Replies<C, A> {
    senders: Vec<oneshot::Sender<A>>,
    _pass: Pass<C, A>,
}

/// Resolves to the answer, or to `None` if there will be none: what carried the call is gone.
pub struct Answer<C, A> {
    answer: oneshot::Receiver<A>,
    shared: Arc<Shared<C, A>>,
    /// From the first look on.
    patience: Option<Pin<Box<Sleep>>>,
}

/// How long a call collects at most, as long as its answer is waited for: many times what a request takes.
const PATIENCE: Duration = Duration::from_millis(10);

impl<C, A> Gather<C, A> {
    /// At most `most_requests` are under way before calls collect, and at most `most_calls` travel as
    /// one. `send` hands a batch on: it must do so in order and without waiting, and leave the rest to
    /// a task.
    pub fn new(
        most_requests: usize,
        most_calls: usize,
        send: impl Fn(Batch<C, A>) + Send + Sync + 'static,
    ) -> Self {
        let fit = move |calls: &Collected<C, A>| calls.len().min(most_calls);
        Self::with(most_requests, fit, send)
    }

    /// The same for stores that judge the calls of a request against what was there before all of them:
    /// two claims on one key would both be granted. A request ends before a call on a key that it has
    /// already.
    pub fn by_key<K: Eq + Hash + ?Sized>(
        most_requests: usize,
        most_calls: usize,
        key: impl Fn(&C) -> &K + Send + Sync + 'static,
        send: impl Fn(Batch<C, A>) + Send + Sync + 'static,
    ) -> Self {
        let fit = move |calls: &Collected<C, A>| {
            let mut keys = HashSet::new();
            let apart = calls.iter().take(most_calls);
            apart.take_while(|(call, _)| keys.insert(key(call))).count()
        };
        Self::with(most_requests, fit, send)
    }

    fn with(
        most_requests: usize,
        fit: impl Fn(&Collected<C, A>) -> usize + Send + Sync + 'static,
        send: impl Fn(Batch<C, A>) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Shared {
            most_requests,
            fit: Box::new(fit),
            queue: Mutex::new(Queue {
                under_way: 0,
                handing_on: false,
                calls: VecDeque::new(),
            }),
            send: Box::new(send),
        }))
    }

    /// Says how a call travels; `call` makes what is sent if it goes with others.
    pub fn enter(&self, call: impl FnOnce() -> C) -> Way<C, A> {
        let mut queue = self.0.queue();
        if queue.under_way < self.0.most_requests && !queue.handing_on && queue.calls.is_empty() {
            queue.under_way += 1;
            return Way::Alone(Pass(self.0.clone()));
        }
        let (sender, receiver) = oneshot::channel();
        queue.calls.push_back((call(), sender));
        Way::Together(Answer {
            answer: receiver,
            shared: self.0.clone(),
            patience: None,
        })
    }
}

impl<C, A> Shared<C, A> {
    /// Hands on what has collected, as long as fewer than `limit` requests are under way.
    fn hand_on(self: &Arc<Self>, limit: usize) {
        loop {
            let calls: Vec<_> = {
                let mut queue = self.queue();
                if queue.handing_on || queue.calls.is_empty() || queue.under_way >= limit {
                    return;
                }
                queue.handing_on = true;
                queue.under_way += 1;
                let fit = (self.fit)(&queue.calls);
                queue.calls.drain(..fit).collect()
            };
            let handed_on = HandedOn(self);
            let (calls, senders) = calls.into_iter().unzip();
            (self.send)(Batch {
                calls,
                replies: Replies {
                    senders,
                    _pass: Pass(self.clone()),
                },
            });
            drop(handed_on);
        }
    }
}

impl<C, A> Shared<C, A> {
    fn queue(&self) -> MutexGuard<'_, Queue<C, A>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C, A> Replies<C, A> {
    /// Answers the calls, in their order.
    pub fn answer(self, answers: impl IntoIterator<Item = A>) {
        for (sender, answer) in self.senders.into_iter().zip(answers) {
            // Nobody waits any more: then nobody wants it.
            drop(sender.send(answer));
        }
    }

    /// Gives the same answer to all calls.
    pub fn answer_all(self, answer: A)
    where
        A: Clone,
    {
        let count = self.senders.len();
        self.answer(std::iter::repeat_n(answer, count));
    }
}

impl<C, A> Future for Answer<C, A> {
    type Output = Option<A>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<A>> {
        let this = &mut *self;
        if let Poll::Ready(answer) = Pin::new(&mut this.answer).poll(cx) {
            return Poll::Ready(answer.ok());
        }
        let patience = this
            .patience
            .get_or_insert_with(|| Box::pin(sleep(PATIENCE)));
        while patience.as_mut().poll(cx).is_ready() {
            this.shared.hand_on(usize::MAX);
            // Somebody else may just be handing on others.
            patience.set(sleep(PATIENCE));
        }
        Poll::Pending
    }
}

impl<C, A> Drop for Pass<C, A> {
    fn drop(&mut self) {
        self.0.queue().under_way -= 1;
        self.0.hand_on(self.0.most_requests);
    }
}

/// The way is free again, also if handing on panicked.
struct HandedOn<'a, C, A>(&'a Shared<C, A>);

impl<C, A> Drop for HandedOn<'_, C, A> {
    fn drop(&mut self) {
        self.0.queue().handing_on = false;
    }
}

impl<C, A> fmt::Debug for Gather<C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.0.queue();
        f.debug_struct("Gather")
            .field("under_way", &queue.under_way)
            .field("collected", &queue.calls.len())
            .finish_non_exhaustive()
    }
}

impl<C, A> fmt::Debug for Answer<C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").finish_non_exhaustive()
    }
}

impl<C, A> fmt::Debug for Pass<C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass").finish_non_exhaustive()
    }
}

impl<C, A> fmt::Debug for Replies<C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replies")
            .field("calls", &self.senders.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    type Sent = mpsc::Receiver<Batch<u32, u32>>;

    fn gather(most_requests: usize, most_calls: usize) -> (Gather<u32, u32>, Sent) {
        let (sender, sent) = mpsc::channel();
        let send = move |batch| drop(sender.send(batch));
        (Gather::new(most_requests, most_calls, send), sent)
    }

    fn alone(way: Way<u32, u32>) -> Pass<u32, u32> {
        match way {
            Way::Alone(pass) => pass,
            Way::Together(_) => panic!("it must wait"),
        }
    }

    fn waits(way: Way<u32, u32>) -> Answer<u32, u32> {
        match way {
            Way::Together(answer) => answer,
            Way::Alone(_) => panic!("it went straight"),
        }
    }

    #[tokio::test]
    async fn calls_collect_while_requests_are_under_way_and_leave_in_order_as_many_as_fit() {
        let (gather, sent) = gather(2, 3);
        let first = alone(gather.enter(|| 0));
        let second = alone(gather.enter(|| 1));
        let answers: Vec<_> = (2..7).map(|n| waits(gather.enter(|| n))).collect();
        assert!(sent.try_recv().is_err());

        drop(second);
        let batch = sent.try_recv().unwrap();
        assert_eq!(batch.calls, [2, 3, 4]);
        assert!(sent.try_recv().is_err(), "two are under way");
        drop(first);
        let next = sent.try_recv().unwrap();
        assert_eq!(next.calls, [5, 6]);
        // Nothing overtakes what is under way.
        let last = waits(gather.enter(|| 7));
        next.replies.answer([50, 60]);
        assert_eq!(sent.try_recv().unwrap().calls, [7]);
        batch.replies.answer([20, 30, 40]);

        let mut got = Vec::new();
        for answer in answers {
            got.push(answer.await.unwrap());
        }
        assert_eq!(got, [20, 30, 40, 50, 60]);
        // The batch was dropped unanswered.
        assert_eq!(last.await, None);
        drop(alone(gather.enter(|| 8)));
    }

    #[tokio::test]
    async fn a_request_ends_before_a_key_that_it_has_already() {
        let (sender, sent) = mpsc::channel();
        let send = move |batch: Batch<(&str, u32), u32>| {
            drop(sender.send(batch.calls.iter().map(|(_, n)| *n).collect::<Vec<_>>()));
        };
        let gather = Gather::by_key(1, 3, |(key, _)| *key, send);
        let Way::Alone(pass) = gather.enter(|| ("a", 0)) else {
            panic!("it must go straight");
        };
        for call in [
            ("a", 1),
            ("b", 2),
            ("a", 3),
            ("a", 4),
            ("b", 5),
            ("c", 6),
            ("d", 7),
        ] {
            drop(gather.enter(|| call));
        }
        drop(pass);
        let sent: Vec<_> = sent.try_iter().collect();
        assert_eq!(sent, [vec![1, 2], vec![3], vec![4, 5, 6], vec![7]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_leaves_though_those_under_way_are_left_alone() {
        let (gather, sent) = gather(2, 3);
        let _left_alone = [0, 1].map(|n| alone(gather.enter(|| n)));
        drop(waits(gather.enter(|| 2)));
        let answer = tokio::spawn(waits(gather.enter(|| 3)));
        sleep(PATIENCE * 2).await;
        let batch = sent.try_recv().unwrap();
        assert_eq!(batch.calls, [2, 3]);
        batch.replies.answer([20, 30]);
        assert_eq!(answer.await.unwrap(), Some(30));
    }

    #[tokio::test]
    async fn a_call_whose_caller_is_gone_leaves_all_the_same() {
        let (gather, sent) = gather(1, 3);
        let pass = alone(gather.enter(|| 0));
        drop(waits(gather.enter(|| 1)));
        drop(pass);
        assert_eq!(sent.try_recv().unwrap().calls, [1]);
    }

    /// What comes while a batch is being handed on must not go straight.
    #[tokio::test]
    async fn nothing_goes_straight_while_a_batch_is_handed_on() {
        let cell = Arc::new(std::sync::OnceLock::<Gather<u32, u32>>::new());
        let (sender, sent) = mpsc::channel();
        let send = {
            let cell = cell.clone();
            move |batch: Batch<u32, u32>| {
                if batch.calls == [1] {
                    // Another thread, in the middle of it.
                    let late = waits(cell.get().unwrap().enter(|| 2));
                    drop(late);
                }
                drop(sender.send(batch));
            }
        };
        let gather = cell.get_or_init(|| Gather::new(2, 8, send));
        let first = alone(gather.enter(|| 0));
        let second = alone(gather.enter(|| 0));
        drop(waits(gather.enter(|| 1)));
        drop((first, second));
        let order: Vec<_> = sent.try_iter().map(|batch| batch.calls).collect();
        assert_eq!(order, [[1], [2]]);
    }

    #[tokio::test]
    async fn a_carrier_that_is_gone_answers_nobody_and_holds_nobody_up() {
        let gather: Gather<u32, u32> = Gather::new(1, 2, drop);
        let pass = alone(gather.enter(|| 0));
        let answers: Vec<_> = (1..9).map(|n| waits(gather.enter(|| n))).collect();
        drop(pass);
        for answer in answers {
            assert_eq!(answer.await, None);
        }
    }
}
