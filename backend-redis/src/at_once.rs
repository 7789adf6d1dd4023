use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;

/// Polls a request once, which puts it on the wire if its connection stands, though nobody may poll it
/// again. `runtime` is the one that it goes on in.
///
/// Not while panicking: a second panic would end the process.
pub(crate) fn poll_once<F: Future + ?Sized>(
    runtime: &Handle,
    request: Pin<&mut F>,
) -> Poll<F::Output> {
    if std::thread::panicking() {
        return Poll::Pending;
    }
    let _runtime = runtime.enter();
    // Unconstrained: a task that has used up its budget would see it pending unsent.
    let once = pin!(tokio::task::unconstrained(request));
    once.poll(&mut Context::from_waker(Waker::noop()))
}
