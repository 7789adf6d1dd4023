use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, PutOptions, ResponseHeader, SortOrder, SortTarget,
    Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use leasehold_core::{Claim, Result};

use crate::endpoints::Channel;
use crate::value;

/// What is asked of the queue of one lock, by itself or [with others](crate::together).
#[derive(Debug, Clone)]
pub(crate) struct Call {
    folder: String,
    /// The claim's own key in it.
    key: String,
    limit: Duration,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    Enter {
        lease: i64,
        waits: bool,
        /// The values that the key gets.
        granted: String,
        queued: String,
    },
    Leave,
}

/// What the server said to a call.
#[derive(Debug, Clone)]
pub(crate) enum Said {
    Entered {
        /// Of the store when it answered.
        revision: i64,
        /// The folder was empty, and our key was put.
        put: bool,
        /// Else: the keys that were asked for.
        newest: Option<GetResponse>,
    },
    /// How many keys were deleted.
    Left(i64),
}

impl Call {
    /// If the folder is empty: put the key. Else: put it, and get the newest two of the folder; a claim
    /// that does not wait does nothing then.
    ///
    /// An attempt that follows an unanswered one asks for its own key instead.
    pub(crate) fn enter(folder: &str, key: &str, lease: i64, claim: &Claim) -> Self {
        let what = What::Enter {
            lease,
            waits: claim.wait != Some(Duration::ZERO),
            granted: value::of(claim, true),
            queued: value::of(claim, false),
        };
        Self::new(folder, key, claim.request_limit, what)
    }

    /// Deletes the key.
    pub(crate) fn leave(folder: &str, key: &str, limit: Duration) -> Self {
        Self::new(folder, key, limit, What::Leave)
    }

    /// The lock that it concerns.
    pub(crate) fn folder(&self) -> &str {
        &self.folder
    }

    /// How long the request may take.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// What no key that it concerns fulfils.
    pub(crate) fn never(&self) -> Compare {
        Compare::create_revision(&*self.key, CompareOp::Less, 0)
    }

    fn new(folder: &str, key: &str, limit: Duration, what: What) -> Self {
        Self {
            folder: folder.to_owned(),
            key: key.to_owned(),
            limit,
            what,
        }
    }

    /// Sends it by itself. `again`: an earlier attempt was not answered.
    pub(crate) async fn alone(
        &self,
        channel: &Channel,
        again: bool,
    ) -> Result<Said, etcd_client::Error> {
        let mut kv = channel.kv.clone();
        if let Some(txn) = self.transaction(again) {
            let answer = kv.txn(txn).await?;
            return Ok(entered(revision(&answer), &answer));
        }
        let answer = kv.delete(&*self.key, None).await?;
        Ok(Said::Left(answer.deleted()))
    }

    /// The same as a part of a transaction.
    pub(crate) fn operation(&self, again: bool) -> TxnOp {
        match self.transaction(again) {
            Some(txn) => TxnOp::txn(txn),
            None => TxnOp::delete(&*self.key, None),
        }
    }

    /// What [`operation`](Self::operation) touches beyond what the server sees of it there: it does not
    /// look into nested transactions.
    pub(crate) fn hidden(&self) -> Vec<TxnOp> {
        match self.what {
            What::Enter { .. } => vec![
                TxnOp::put(&*self.key, "", None),
                newest(&self.folder, 1, None),
            ],
            What::Leave => vec![],
        }
    }

    /// What a part of the answer to a transaction says.
    pub(crate) fn said(revision: i64, part: &TxnOpResponse) -> Option<Said> {
        match part {
            TxnOpResponse::Txn(answer) => Some(entered(revision, answer)),
            TxnOpResponse::Delete(answer) => Some(Said::Left(answer.deleted())),
            _ => None,
        }
    }

    fn transaction(&self, again: bool) -> Option<Txn> {
        let What::Enter {
            lease,
            waits,
            granted,
            queued,
        } = &self.what
        else {
            return None;
        };
        let put = |value: &str| {
            let options = PutOptions::new().with_lease(*lease);
            TxnOp::put(&*self.key, value, Some(options))
        };
        let ask = if again {
            TxnOp::get(&*self.key, Some(GetOptions::new().with_keys_only()))
        } else {
            newest(&self.folder, 2, None)
        };
        let queue = match (waits, again) {
            (true, _) => vec![put(queued), ask],
            (false, true) => vec![ask],
            (false, false) => vec![],
        };
        let empty = Compare::create_revision(&*self.folder, CompareOp::Equal, 0).with_prefix();
        let txn = Txn::new().when([empty]).and_then([put(granted)]);
        Some(txn.or_else(queue))
    }
}

/// The newest keys of a folder, those created by `until` at the latest.
pub(crate) fn newest(folder: &str, count: i64, until: Option<i64>) -> TxnOp {
    let mut options = GetOptions::new()
        .with_prefix()
        .with_keys_only()
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_limit(count);
    if let Some(until) = until {
        options = options.with_max_create_revision(until);
    }
    TxnOp::get(folder, Some(options))
}

/// The revision of the store when it answered.
pub(crate) fn revision(answer: &TxnResponse) -> i64 {
    answer.header().map_or(0, ResponseHeader::revision)
}

/// The keys that a transaction asked for.
pub(crate) fn got(answer: &TxnResponse) -> Option<GetResponse> {
    answer
        .op_responses()
        .into_iter()
        .find_map(|answer| match answer {
            TxnOpResponse::Get(got) => Some(got),
            _ => None,
        })
}

fn entered(revision: i64, answer: &TxnResponse) -> Said {
    Said::Entered {
        revision,
        put: answer.succeeded(),
        newest: got(answer),
    }
}
