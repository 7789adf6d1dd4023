use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

/// A future that is polled so many times and then dropped, as a cancelled task would drop it at its
/// next await. Tried with 1, 2, 3 … polls until it completes, it is dropped at every await in turn.
#[derive(Debug)]
pub(crate) struct Steps<F> {
    future: Option<Pin<Box<F>>>,
    left: usize,
}

/// How a future ended under [`Steps`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step<T> {
    /// It completed before its polls were used up.
    Completed(T),
    /// It was dropped.
    Dropped,
}

/// Lets `future` make `steps` polls.
pub(crate) fn steps<F: Future>(steps: usize, future: F) -> Steps<F> {
    Steps {
        future: Some(Box::pin(future)),
        left: steps,
    }
}

impl<F: Future> Future for Steps<F> {
    type Output = Step<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let left = self.left;
        if let (Some(future), 1..) = (&mut self.future, left) {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                self.future = None;
                return Poll::Ready(Step::Completed(output));
            }
            self.left = left - 1;
            if self.left > 0 {
                return Poll::Pending;
            }
        }
        self.future = None;
        Poll::Ready(Step::Dropped)
    }
}

/// Counts how often `future` is polled: what it costs to wait.
pub(crate) async fn counted<F: Future>(polls: &AtomicU64, future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|cx| {
        polls.fetch_add(1, Ordering::Relaxed);
        future.as_mut().poll(cx)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::yield_now;

    #[tokio::test]
    async fn every_await_is_reached_in_turn() {
        let mut reached = Vec::new();
        for polls in 1.. {
            let mut at = 0;
            let future = async {
                for await_point in 1..=3 {
                    at = await_point;
                    yield_now().await;
                }
            };
            let step = steps(polls, future).await;
            reached.push(at);
            if step == Step::Completed(()) {
                break;
            }
        }
        assert_eq!(reached, [1, 2, 3, 3]);
    }
}
