use std::io::{self, BufRead, IsTerminal, Write};

use leasehold::Holder;

use crate::cli::{BreakArgs, StoreArgs};
use crate::exit::{Exit, Failure};
use crate::output::{self, WARN};
use crate::{status, store};

/// Shows who holds the lock, asks, and takes away that grant and no other.
pub(crate) fn break_lock(store: &StoreArgs, args: &BreakArgs) -> Result<Exit, Failure> {
    store::runtime()?.block_on(async {
        let locks = store.open().await?;
        let Some(holder) = locks.holder(&args.key).await? else {
            show(&status::as_text(&args.key, None));
            return Ok(Exit::No);
        };
        show(&status::as_text(&args.key, Some(&holder)));
        // Nothing else runs on this thread: it may block while the user thinks.
        if !args.yes && !confirmed(&holder)? {
            output::warning("nothing was taken away");
            return Ok(Exit::No);
        }
        if locks.evict(&args.key, Some(&holder)).await? {
            output::warning(format_args!(
                "{} was taken away",
                output::printable(&args.key)
            ));
            return Ok(Exit::Done);
        }
        output::warning(match locks.holder(&args.key).await? {
            Some(now) if now.grant == holder.grant => {
                "told the holder to let go, but it still holds the lock"
            }
            Some(_) => "somebody else holds the lock by now: nothing was taken away",
            None => "the holder let go by itself: nothing was taken away",
        });
        Ok(Exit::No)
    })
}

fn show(text: &str) {
    anstream::stderr().write_all(text.as_bytes()).ok();
}

fn confirmed(holder: &Holder) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::new(
            Exit::Usage,
            "nobody to ask, since standard input is no terminal: give --yes to take the lock away",
        ));
    }
    let others = match holder.also_ends {
        0 => String::new(),
        1 => " One other lock ends with it.".into(),
        n => format!(" {n} other locks end with it."),
    };
    write!(
        anstream::stderr(),
        "{WARN}Take it away?{WARN:#}{others} [y/N] "
    )
    .ok();
    let mut answer = String::new();
    io::stdin()
        .lock()
        .read_line(&mut answer)
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot read the answer: {error}")))?;
    Ok(matches!(
        answer.trim().to_ascii_lowercase().as_str(),
        "y" | "yes"
    ))
}
