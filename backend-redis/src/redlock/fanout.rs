use std::future::poll_fn;
use std::task::Poll;

use leasehold_core::Result;

use super::node::Reply;

/// Replies of several nodes, taken in as they come.
///
/// Dropping it leaves the requests alone: they go through by themselves.
pub(crate) struct Fanout<T> {
    replies: Vec<Option<Reply<T>>>,
}

impl<T> Fanout<T> {
    /// The replies, each with the index of its node; `None` where nothing was asked.
    pub(crate) fn new(replies: impl IntoIterator<Item = Option<Reply<T>>>) -> Self {
        Self {
            replies: replies.into_iter().collect(),
        }
    }

    /// The next reply; `None` when all are in.
    ///
    /// # Cancel safety
    /// No reply is lost.
    pub(crate) async fn next(&mut self) -> Option<(usize, Result<T>)> {
        poll_fn(|cx| {
            let mut left = false;
            for (index, slot) in self.replies.iter_mut().enumerate() {
                let Some(reply) = slot else { continue };
                match reply.as_mut().poll(cx) {
                    Poll::Ready(reply) => {
                        *slot = None;
                        return Poll::Ready(Some((index, reply)));
                    }
                    Poll::Pending => left = true,
                }
            }
            if left {
                Poll::Pending
            } else {
                Poll::Ready(None)
            }
        })
        .await
    }

    /// How many are still to come.
    pub(crate) fn left(&self) -> usize {
        self.replies.iter().flatten().count()
    }
}
