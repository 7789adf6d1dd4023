use std::pin::Pin;
use std::task::{Context, Poll};

use leasehold_core::{Result, poll_once};
use tokio::runtime::Handle;

use super::node::Reply;

/// A request that leaves at once and goes through whether or not anybody waits for the answer.
///
/// It is polled when it is made, which puts it on the wire if the connection stands; dropped
/// unanswered, it goes on in `runtime`.
pub(crate) struct Sent<T: Send + 'static> {
    runtime: Handle,
    request: Option<Reply<T>>,
    answer: Option<Result<T>>,
}

impl<T: Send + Unpin + 'static> Sent<T> {
    pub(crate) fn new(
        runtime: Handle,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Self {
        let mut request: Reply<T> = Box::pin(request);
        let (request, answer) = match poll_once(&runtime, request.as_mut()) {
            Poll::Ready(answer) => (None, Some(answer)),
            Poll::Pending => (Some(request), None),
        };
        Self {
            runtime,
            request,
            answer,
        }
    }
}

impl<T: Send + Unpin + 'static> Future for Sent<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if let Some(answer) = self.answer.take() {
            return Poll::Ready(answer);
        }
        match &mut self.request {
            Some(request) => {
                let polled = request.as_mut().poll(cx);
                if polled.is_ready() {
                    self.request = None;
                }
                polled
            }
            None => Poll::Pending,
        }
    }
}

impl<T: Send + 'static> Drop for Sent<T> {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            drop(self.runtime.spawn(async move {
                let _answer = request.await;
            }));
        }
    }
}
