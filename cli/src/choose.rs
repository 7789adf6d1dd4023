use std::io::Write;

use leasehold::{Answer, Candidate, Error, ErrorKind, Guarantees, Judgement, Need, shown};
use serde_json::{Value, json};

use crate::cli::{ChooseArgs, StoreArgs};
use crate::exit::{Exit, Failure};
use crate::output::{self, BAD, BOLD, GOOD, WARN};
use crate::store;

/// Shows which stores do what is needed.
pub(crate) fn choose(store: &StoreArgs, args: &ChooseArgs) -> Result<Exit, Failure> {
    let urls: Vec<&str> = match (&args.urls[..], store.url.as_deref()) {
        ([], Some(url)) if !args.all && !url.is_empty() => vec![url],
        (urls, _) => urls.iter().map(String::as_str).collect(),
    };
    let asked = args.needs();
    let needs = if asked.is_empty() {
        &Need::ALL[..]
    } else {
        &asked
    };
    let mut stores = Vec::new();
    if urls.is_empty() {
        for candidate in Candidate::known() {
            stores.push(Judged::of(candidate, needs));
        }
    } else {
        let runtime = store::runtime()?;
        for url in urls {
            let opened = runtime.block_on(async {
                let locks = leasehold::open(url).await?;
                let guarantees = locks.guarantees();
                // Nothing is held: what cannot be given back ends by itself.
                locks.close().await.ok();
                Ok::<_, Error>(guarantees)
            });
            stores.push(match opened {
                Ok(guarantees) => Judged::of(Candidate::new(shown(url), guarantees), needs),
                Err(error) if error.kind() == ErrorKind::Invalid => return Err(error.into()),
                Err(error) => Judged::failed(shown(url), error),
            });
        }
    }
    let text = if args.json {
        let stores: Vec<Value> = stores.iter().map(Judged::as_json).collect();
        format!("{}\n", json!({ "stores": stores }))
    } else {
        stores
            .iter()
            .map(|it| it.as_text(!asked.is_empty()))
            .collect()
    };
    output::written(anstream::stdout().write_all(text.as_bytes()))?;
    let reached = stores.iter().any(|it| it.error.is_none());
    Ok(
        if stores.iter().any(Judged::does_all) || asked.is_empty() && reached {
            Exit::Done
        } else if stores.iter().any(Judged::may_do_later) {
            Exit::Unavailable
        } else {
            Exit::No
        },
    )
}

impl ChooseArgs {
    fn needs(&self) -> Vec<Need> {
        let mut needs: Vec<Need> = [
            (self.node_loss, Need::NodeLoss),
            (self.consensus, Need::Consensus),
            (self.durable_tokens, Need::DurableTokens),
            (self.order, Need::Order),
            (self.expiry, Need::Expiry),
            (self.push, Need::Push),
        ]
        .into_iter()
        .filter_map(|(asked, need)| asked.then_some(need))
        .collect();
        needs.extend(self.ttl.map(Need::Ttl));
        needs
    }
}

/// A store, and what it was found to be.
struct Judged {
    name: String,
    /// The URL of such a store.
    form: String,
    guarantees: Option<Guarantees>,
    needs: Vec<(Need, Judgement)>,
    error: Option<Error>,
}

impl Judged {
    fn of(candidate: Candidate, needs: &[Need]) -> Self {
        Self {
            guarantees: Some(candidate.guarantees),
            needs: needs.iter().map(|&it| (it, candidate.judge(it))).collect(),
            name: candidate.name,
            form: candidate.form,
            error: None,
        }
    }

    fn failed(name: String, error: Error) -> Self {
        Self {
            form: name.clone(),
            name,
            guarantees: None,
            needs: Vec::new(),
            error: Some(error),
        }
    }

    fn does_all(&self) -> bool {
        let does = |(_, judgement): &(Need, Judgement)| judgement.answer != Answer::No;
        self.error.is_none() && self.needs.iter().all(does)
    }

    fn may_do_later(&self) -> bool {
        self.error.as_ref().is_some_and(Error::is_transient)
    }

    fn as_text(&self, asked: bool) -> String {
        let name = output::printable(&self.name);
        if let Some(error) = &self.error {
            let error = output::printable(&error.to_string());
            return format!("{BOLD}{name}{BOLD:#} {BAD}failed{BAD:#}: {error}\n");
        }
        let all = match (asked, self.does_all()) {
            (false, _) => String::new(),
            (true, true) => format!(" {GOOD}does all{GOOD:#}"),
            (true, false) => format!(" {BAD}lacks something{BAD:#}"),
        };
        let form = match &self.form {
            form if *form == self.name => String::new(),
            form => format!("  {form}"),
        };
        let mut text = format!("{BOLD}{name}{BOLD:#}{form}{all}\n");
        for (need, Judgement { answer, reason, .. }) in &self.needs {
            let style = match answer {
                Answer::Yes => GOOD,
                Answer::Depends => WARN,
                Answer::No => BAD,
            };
            let need = need.to_string();
            text.push_str(&format!(
                "  {style}{answer:7}{style:#} {need:28} {reason}\n"
            ));
        }
        if let (false, Some(guarantees)) = (asked, self.guarantees) {
            let shortest = output::short(guarantees.shortest_ttl);
            text.push_str(&format!("          {:28} {shortest}\n", "shortest ttl"));
        }
        text
    }

    fn as_json(&self) -> Value {
        let needs: Vec<Value> = self
            .needs
            .iter()
            .map(|(need, judgement)| {
                json!({
                    "need": need.to_string(),
                    "answer": judgement.answer.to_string(),
                    "reason": judgement.reason,
                })
            })
            .collect();
        json!({
            "store": self.name,
            "url": self.form,
            "does_all": self.does_all(),
            "error": self.error.as_ref().map(ToString::to_string),
            "guarantees": self.guarantees.as_ref().map(guarantees_as_json),
            "needs": needs,
        })
    }
}

pub(crate) fn guarantees_as_json(guarantees: &Guarantees) -> Value {
    json!({
        "consistency": format!("{:?}", guarantees.consistency),
        "node_losses": guarantees.node_losses,
        "expiry": format!("{:?}", guarantees.expiry),
        "shortest_ttl_ms": u64::try_from(guarantees.shortest_ttl.as_millis()).unwrap_or(u64::MAX),
        "fairness": format!("{:?}", guarantees.fairness),
        "wakeup": format!("{:?}", guarantees.wakeup),
        "tokens": format!("{:?}", guarantees.tokens),
    })
}
