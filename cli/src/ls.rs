use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anstream::AutoStream;
use leasehold::{Listed, Locks};
use serde_json::{Value, json};
use tokio::time::sleep;
use unicode_width::UnicodeWidthStr;

use crate::cli::{LsArgs, StoreArgs};
use crate::exit::{Exit, Failure};
use crate::output::{self, BOLD};
use crate::{status, store};

/// Lists the locks, once or again and again.
///
/// Nothing is held and no signal is caught: Ctrl-C ends it wherever it is.
pub(crate) fn ls(store: &StoreArgs, args: &LsArgs) -> Result<Exit, Failure> {
    let runtime = store::runtime()?;
    let outcome = runtime.block_on(list(store, args));
    // Whatever still blocks somewhere does not keep us.
    runtime.shutdown_background();
    outcome
}

async fn list(store: &StoreArgs, args: &LsArgs) -> Result<Exit, Failure> {
    let locks = store.open().await?;
    let mut screen = Screen::new(args);
    let mut listed = read(&locks, &args.prefix).await;
    loop {
        match listed {
            Ok(listed) => {
                if !screen.show(&listed)? {
                    return Ok(Exit::Done);
                }
            }
            // Once it has worked, a store that is away for a while is waited for.
            Err(error) if screen.has_shown && error.is_transient() => {
                output::warning(Failure::from(error));
            }
            Err(error) => return Err(error.into()),
        }
        let Some(interval) = args.watch else {
            return Ok(Exit::Done);
        };
        /// Oftener nobody can look, and the store has others to serve.
        const SHORTEST: Duration = Duration::from_millis(100);
        sleep(interval.max(SHORTEST)).await;
        listed = read(&locks, &args.prefix).await;
    }
}

/// All of them, each once, in the order of their names.
async fn read(locks: &Locks, prefix: &str) -> leasehold::Result<Vec<Listed>> {
    let mut listing = locks.list(prefix);
    let mut all = BTreeMap::new();
    while let Some(listed) = listing.next().await? {
        all.insert((name(&listed).to_owned(), listed.raw.clone()), listed);
    }
    Ok(all.into_values().collect())
}

/// What to call it, to people too.
fn name(listed: &Listed) -> &str {
    listed.key.as_ref().map_or(&listed.raw, |key| key.as_str())
}

/// Where lists are shown.
struct Screen {
    json: bool,
    /// Each list takes the place of the one before.
    in_place: bool,
    has_shown: bool,
}

impl Screen {
    fn new(args: &LsArgs) -> Self {
        let terminal = io::stdout().is_terminal()
            && AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never;
        Self {
            json: args.json,
            in_place: terminal && args.watch.is_some() && !args.json,
            has_shown: false,
        }
    }

    /// Shows the next list; false: nobody reads any more.
    fn show(&mut self, locks: &[Listed]) -> Result<bool, Failure> {
        let text = match self.json {
            true => format!("{}\n", Value::from_iter(locks.iter().map(as_json))),
            false => table(locks),
        };
        let text = match (self.in_place, self.has_shown) {
            (true, shown) => in_place(&text, !shown, height()),
            (false, true) if !self.json => format!("\n{text}"),
            (false, _) => text,
        };
        self.has_shown = true;
        let mut stdout = anstream::stdout();
        let written = stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush());
        let gone = matches!(&written, Err(error) if error.kind() == io::ErrorKind::BrokenPipe);
        output::written(written)?;
        Ok(!gone)
    }
}

fn as_json(listed: &Listed) -> Value {
    let mut json = json!({
        "key": listed.key.as_ref().map(|key| key.as_str()),
        "raw": listed.raw,
        "waiting": listed.waiting,
        "held": listed.holder.is_some(),
    });
    if let Some(holder) = &listed.holder {
        status::add_holder(&mut json, holder);
    }
    json
}

const HEADINGS: [&str; 7] = ["KEY", "OWNER", "LABEL", "SINCE", "TOKEN", "LEFT", "WAITING"];

/// A line for each lock; what is not known is `-`.
fn table(locks: &[Listed]) -> String {
    if locks.is_empty() {
        return "nothing is held or waited for\n".into();
    }
    let rows: Vec<_> = locks.iter().map(row).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].width());
        cells.chain([HEADINGS[column].width()]).max().unwrap_or(0)
    };
    let widths: [usize; HEADINGS.len()] = std::array::from_fn(width);
    let line = |cells: &[String; HEADINGS.len()]| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width - cell.width() + 2));
        }
        line.trim_end().to_owned()
    };
    let mut text = format!("{BOLD}{}{BOLD:#}\n", line(&HEADINGS.map(str::to_owned)));
    for row in &rows {
        text.push_str(&line(row));
        text.push('\n');
    }
    text
}

fn row(listed: &Listed) -> [String; HEADINGS.len()] {
    let holder = listed.holder.as_ref();
    let age = holder
        .and_then(|holder| holder.since)
        .and_then(output::age)
        .map(|age| format!("{} ago", output::short(Duration::from_secs(age.as_secs()))));
    let cells = [
        Some(output::printable(name(listed))),
        holder.and_then(|it| it.owner.as_deref().map(output::printable)),
        holder.and_then(|it| it.label.as_deref().map(output::printable)),
        age,
        holder.and_then(|it| it.token.map(|token| token.to_string())),
        holder.and_then(|it| it.remaining.map(output::short)),
        listed.waiting.map(|waiting| waiting.to_string()),
    ];
    cells.map(|cell| cell.unwrap_or_else(|| "-".into()))
}

/// `text` over what is on the terminal, as much of it as there is room for.
fn in_place(text: &str, first: bool, height: usize) -> String {
    let mut screen = String::from(if first { "\x1b[2J\x1b[H" } else { "\x1b[H" });
    let lines = text.lines().count();
    // One is left for the cursor, one for what is left out.
    let room = match height.saturating_sub(1) {
        room if lines <= room => lines,
        room => room.saturating_sub(1),
    };
    for line in text.lines().take(room) {
        screen.push_str(line);
        screen.push_str("\x1b[K\n");
    }
    if lines > room {
        screen.push_str(&format!("… and {} more\x1b[K\n", lines - room));
    }
    screen.push_str("\x1b[J");
    screen
}

/// How many lines the terminal has.
fn height() -> usize {
    terminal_size::terminal_size().map_or(24, |(_, terminal_size::Height(lines))| lines.into())
}

#[cfg(test)]
mod tests {
    use leasehold::{Holder, Key};

    use super::*;

    fn listed(key: &str, owner: &str) -> Listed {
        let mut holder = Holder::new("g");
        holder.owner = Some(owner.into());
        let mut listed = Listed::new(Key::new(key).ok(), format!("lock:{key}"));
        listed.holder = Some(holder);
        listed
    }

    #[test]
    fn columns_stand_below_each_other_whatever_the_letters() {
        let mut unheld = Listed::new(None, "4711");
        unheld.waiting = Some(12);
        let locks = [listed("日本語", "a"), listed("e\u{301}x", "b"), unheld];
        let text = table(&locks);
        let text = text.replace(&BOLD.to_string(), "");
        let columns: Vec<usize> = ["OWNER", "a  ", "b  ", "-  "]
            .iter()
            .zip(text.lines())
            .map(|(cell, line)| line[..line.find(cell).unwrap()].width())
            .collect();
        assert_eq!(columns, [8; 4], "{text}");
        assert!(text.lines().last().unwrap().ends_with("12"), "{text}");
        assert!(text.lines().last().unwrap().starts_with("4711"), "{text}");
    }

    #[test]
    fn nothing_from_the_store_steers_the_terminal() {
        let text = table(&[listed("a\x1b[2J", "b\nc")]);
        assert!(text.contains("a\u{fffd}[2J"), "{text:?}");
        assert_eq!(text.lines().count(), 2, "{text:?}");
    }

    #[test]
    fn json_tells_what_is_not_known_from_what_is_not_there() {
        assert_eq!(
            as_json(&Listed::new(None, "4711")).to_string(),
            r#"{"held":false,"key":null,"raw":"4711","waiting":null}"#
        );
        let json = as_json(&listed("k", "me"));
        assert_eq!(json["key"], "k");
        assert_eq!(json["raw"], "lock:k");
        assert_eq!(json["owner"], "me");
        assert_eq!(json["token"], Value::Null);
    }

    #[test]
    fn a_list_that_is_too_long_for_the_terminal_is_cut() {
        let text = "1\n2\n3\n4\n";
        let shown = |height| in_place(text, false, height).replace("\x1b[K", "");
        assert_eq!(shown(5), "\x1b[H1\n2\n3\n4\n\x1b[J");
        assert_eq!(shown(4), "\x1b[H1\n2\n… and 2 more\n\x1b[J");
    }
}
