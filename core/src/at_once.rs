use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;

/// Polls a request once, which puts it on the wire if its connection stands, though nobody may poll it
/// again. For backends, where something is to be sent from a `drop` or in an order. `runtime` is the one
/// that it goes on in.
///
/// It is pending, and was not polled, while the thread panics (a second panic would end the process), or
/// where its thread-locals are gone (entering a runtime would panic).
pub fn poll_once<F: Future + ?Sized>(runtime: &Handle, request: Pin<&mut F>) -> Poll<F::Output> {
    let is_ending = Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed());
    if std::thread::panicking() || is_ending {
        return Poll::Pending;
    }
    let _runtime = runtime.enter();
    // Unconstrained: a task that has used up its budget would see it pending unsent.
    let once = pin!(tokio::task::unconstrained(request));
    once.poll(&mut Context::from_waker(Waker::noop()))
}

#[cfg(test)]
mod tests {
    use std::future::{poll_fn, ready};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use tokio::task::consume_budget;

    use super::*;

    #[tokio::test]
    async fn it_is_polled_though_the_task_has_used_up_its_budget() {
        poll_fn(|cx| {
            while pin!(consume_budget()).poll(cx).is_ready() {}
            let request = pin!(consume_budget());
            assert!(poll_once(&Handle::current(), request).is_ready());
            Poll::Ready(())
        })
        .await;
    }

    #[tokio::test]
    async fn it_is_left_alone_while_the_thread_panics() {
        struct Dropped<'a>(&'a mut Option<Poll<()>>);

        impl Drop for Dropped<'_> {
            fn drop(&mut self) {
                *self.0 = Some(poll_once(&Handle::current(), pin!(ready(()))));
            }
        }

        let mut polled = None;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _dropped = Dropped(&mut polled);
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(polled, Some(Poll::Pending));
    }
}
