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
/// 3. *In order*, of each key where keys are told apart. No call leaves before one that came earlier, also
///    where two requests are under way or two threads are at it: whoever hands a request on has handed
///    it on before the next may go. (Else the withdrawal of a claim might overtake the claim.)
/// 4. *Whatever collected leaves*, also when the caller's future is dropped: it is on its way from the
///    moment it was [entered](Self::enter).
/// 5. *Nobody is held up for long.* A call that went straight is under way until its future has seen the
///    answer, and whoever has that future may leave it alone, as a `select!` does while it is busy with
///    another. A request of several is driven by a task: when the last of those ends, what has collected
///    leaves whatever else is under way. And while there is none, a call that is waited for and has
///    collected for a while leaves all the same, with those before it.
///
/// This is the group commit of `DeWitt` et al., "Implementation techniques for main memory database
/// systems" (1984), without its timer: the request under way is what is waited for.
pub struct Gather<C, A>(Arc<Shared<C, A>>);

struct Shared<C, A> {
    most_requests: usize,
    /// Takes those that leave as one out of what has collected: one at least.
    take: Take<C, A>,
    queue: Mutex<Queue<C, A>>,
    send: Box<dyn Fn(Batch<C, A>) + Send + Sync>,
}

struct Queue<C, A> {
    under_way: usize,
    /// How many of those are requests of several.
    batches: usize,
    /// What has collected leaves however many are under way.
    overdue: bool,
    /// Somebody is handing a request on: all others queue.
    handing_on: bool,
    calls: Collected<C, A>,
}

type Collected<C, A> = VecDeque<(C, oneshot::Sender<A>)>;
type Take<C, A> = Box<dyn Fn(&mut Collected<C, A>) -> Collected<C, A> + Send + Sync>;

/// How a call travels.
#[derive(Debug)]
pub enum Way<C, A> {
    /// By itself: the caller sends it now, and drops the pass when it has its answer.
    Alone(Pass<C, A>),
    /// With others: the answer will come.
    Together(Answer<C, A>),
}

/// Counts as a request under way until it is dropped.
pub struct Pass<C, A> {
    shared: Arc<Shared<C, A>>,
    batch: bool,
}

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
    pass: Arc<Pass<C, A>>,
}

/// Resolves to the answer, or to `None` if there will be none: what carried the call is gone.
pub struct Answer<C, A> {
    answer: oneshot::Receiver<A>,
    shared: Arc<Shared<C, A>>,
    /// From the first look on at which no batch was under way that will see to it.
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
        let take = move |calls: &mut Collected<C, A>| {
            let fit = calls.len().min(most_calls);
            calls.drain(..fit).collect()
        };
        Self::with(most_requests, take, send)
    }

    /// The same for stores that judge the calls of a request against what was there before all of them:
    /// two claims on one key would both be granted. The second call on a key waits for another request,
    /// and holds nobody up who asks for another key.
    pub fn by_key<K: Eq + Hash + ?Sized>(
        most_requests: usize,
        most_calls: usize,
        key: impl Fn(&C) -> &K + Send + Sync + 'static,
        send: impl Fn(Batch<C, A>) + Send + Sync + 'static,
    ) -> Self {
        let take = move |calls: &mut Collected<C, A>| {
            let mut leaves = Vec::with_capacity(calls.len());
            {
                let mut keys = HashSet::new();
                for (call, _) in &*calls {
                    leaves.push(keys.len() < most_calls && keys.insert(key(call)));
                }
            }
            let mut leaves = leaves.into_iter();
            let all = std::mem::take(calls).into_iter();
            let (leaving, rest) = all.partition(|_| leaves.next() == Some(true));
            *calls = rest;
            leaving
        };
        Self::with(most_requests, take, send)
    }

    fn with(
        most_requests: usize,
        take: impl Fn(&mut Collected<C, A>) -> Collected<C, A> + Send + Sync + 'static,
        send: impl Fn(Batch<C, A>) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Shared {
            most_requests,
            take: Box::new(take),
            queue: Mutex::new(Queue {
                under_way: 0,
                batches: 0,
                overdue: false,
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
            return Way::Alone(Pass {
                shared: self.0.clone(),
                batch: false,
            });
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
    /// Hands on what has collected, as long as that may leave.
    fn hand_on(self: &Arc<Self>) {
        loop {
            let calls = {
                let mut queue = self.queue();
                if queue.handing_on || queue.calls.is_empty() {
                    return;
                }
                let overdue = std::mem::take(&mut queue.overdue);
                if queue.under_way >= self.most_requests && !overdue {
                    return;
                }
                queue.handing_on = true;
                queue.under_way += 1;
                queue.batches += 1;
                (self.take)(&mut queue.calls)
            };
            let handed_on = HandedOn(self);
            let (calls, senders) = calls.into_iter().unzip();
            (self.send)(Batch {
                calls,
                replies: Replies {
                    senders,
                    pass: Arc::new(Pass {
                        shared: self.clone(),
                        batch: true,
                    }),
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

impl<C, A> Batch<C, A> {
    /// Parts it in two, in order: the calls of which `chosen` says so, and the others. Each can be sent
    /// and answered by itself; they count as one request, under way until both are answered.
    pub fn part(self, mut chosen: impl FnMut(&C) -> bool) -> (Self, Self) {
        let Replies { senders, pass } = self.replies;
        let calls = self.calls.into_iter().zip(senders);
        let (some, others): (Vec<_>, Vec<_>) = calls.partition(|(call, _)| chosen(call));
        let batch = |some: Vec<(C, oneshot::Sender<A>)>, pass| {
            let (calls, senders) = some.into_iter().unzip();
            let replies = Replies { senders, pass };
            Self { calls, replies }
        };
        (batch(some, pass.clone()), batch(others, pass))
    }
}

impl<C, A> Replies<C, A> {
    /// Answers the calls, in their order.
    pub fn answer(self, answers: impl IntoIterator<Item = A>) {
        // The store gets its next request before those who asked run on.
        drop(self.pass);
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
        if this.patience.is_none() && this.shared.queue().batches > 0 {
            return Poll::Pending;
        }
        let patience = this
            .patience
            .get_or_insert_with(|| Box::pin(sleep(PATIENCE)));
        while patience.as_mut().poll(cx).is_ready() {
            this.shared.queue().overdue = true;
            this.shared.hand_on();
            // Those before it may have filled a request.
            patience.set(sleep(PATIENCE));
        }
        Poll::Pending
    }
}

impl<C, A> Drop for Pass<C, A> {
    fn drop(&mut self) {
        {
            let mut queue = self.shared.queue();
            queue.under_way -= 1;
            if self.batch {
                queue.batches -= 1;
                queue.overdue |= queue.batches == 0 && !queue.calls.is_empty();
            }
        }
        self.shared.hand_on();
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
    async fn a_request_has_one_call_of_a_key_and_others_are_not_held_up_by_more() {
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
        assert_eq!(sent, [vec![1, 2, 6], vec![3, 5, 7], vec![4]]);
    }

    #[tokio::test]
    async fn the_parts_of_a_batch_are_answered_apart_and_count_as_one_request() {
        let (gather, sent) = gather(1, 4);
        let pass = alone(gather.enter(|| 0));
        let mut answers: Vec<_> = (1..6).map(|n| waits(gather.enter(|| n))).collect();
        drop(pass);
        let (odd, even) = sent.try_recv().unwrap().part(|call| call % 2 == 1);
        assert_eq!(
            (&odd.calls[..], &even.calls[..]),
            (&[1, 3][..], &[2, 4][..])
        );
        let last = answers.pop().unwrap();
        odd.replies.answer([10, 30]);
        assert_eq!(answers.remove(2).await, Some(30));
        assert_eq!(answers.remove(0).await, Some(10));
        assert!(sent.try_recv().is_err(), "a part of it is still under way");
        even.replies.answer([20, 40]);
        assert_eq!(answers.remove(0).await, Some(20));
        assert_eq!(answers.remove(0).await, Some(40));
        let batch = sent.try_recv().unwrap();
        batch.replies.answer_all(50);
        assert_eq!(last.await, Some(50));
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

    /// It has no timer of its own: the end of the batch is what it waits for.
    #[tokio::test(start_paused = true)]
    async fn what_collects_behind_a_batch_leaves_at_its_end_though_others_are_left_alone() {
        let (gather, sent) = gather(2, 3);
        let _left_alone = [0, 1].map(|n| alone(gather.enter(|| n)));
        let answer = tokio::spawn(waits(gather.enter(|| 2)));
        sleep(PATIENCE * 2).await;
        let batch = sent.try_recv().unwrap();
        let mut behind = waits(gather.enter(|| 3));
        let look = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut behind).poll(cx)));
        assert!(look.await.is_pending());
        assert!(behind.patience.is_none());

        batch.replies.answer([20]);
        let next = sent.try_recv().unwrap();
        assert_eq!(next.calls, [3]);
        next.replies.answer([30]);
        assert_eq!(answer.await.unwrap(), Some(20));
        assert_eq!(behind.await, Some(30));
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
