use std::io::Write;
use std::time::Duration;

use leasehold::Holder;
use serde_json::{Value, json};

use crate::cli::{StatusArgs, StoreArgs};
use crate::exit::{Exit, Failure};
use crate::output::{self, BOLD, GOOD, WARN};
use crate::store;

/// Shows who holds the lock.
pub(crate) fn status(store: &StoreArgs, args: &StatusArgs) -> Result<Exit, Failure> {
    let holder = store::runtime()?.block_on(async {
        let locks = store.open().await?;
        Ok::<_, Failure>(locks.holder(&args.key).await?)
    })?;
    let text = if args.json {
        format!("{}\n", as_json(&args.key, holder.as_ref()))
    } else {
        as_text(&args.key, holder.as_ref())
    };
    output::written(anstream::stdout().write_all(text.as_bytes()))?;
    Ok(match holder {
        Some(_) => Exit::Done,
        None => Exit::No,
    })
}

/// A heading and a line for each thing that the store knows.
pub(crate) fn as_text(key: &str, holder: Option<&Holder>) -> String {
    let key = output::printable(key);
    let Some(holder) = holder else {
        return format!("{BOLD}{key}{BOLD:#} is {GOOD}free{GOOD:#}\n");
    };
    let mut text = format!("{BOLD}{key}{BOLD:#} is {WARN}held{WARN:#}\n");
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            text.push_str(&format!("  {name:<6} {value}\n"));
        }
    };
    line("owner", holder.owner.as_deref().map(output::printable));
    line("label", holder.label.as_deref().map(output::printable));
    line("token", holder.token.map(|token| token.to_string()));
    line(
        "since",
        holder.since.map(|since| {
            let at = humantime::format_rfc3339_seconds(since);
            match output::age(since) {
                Some(age) => format!("{at}, {} ago", output::short(age)),
                None => at.to_string(),
            }
        }),
    );
    line("left", holder.remaining.map(output::short));
    text
}

fn as_json(key: &str, holder: Option<&Holder>) -> Value {
    let mut json = json!({ "key": key, "held": holder.is_some() });
    if let Some(holder) = holder {
        add_holder(&mut json, holder);
    }
    json
}

/// What is known of a holder, as fields of an object.
pub(crate) fn add_holder(json: &mut Value, holder: &Holder) {
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    json["owner"] = json!(holder.owner);
    json["label"] = json!(holder.label);
    json["token"] = json!(holder.token.map(|token| token.get()));
    json["since"] = json!(
        holder
            .since
            .map(|since| humantime::format_rfc3339_millis(since).to_string())
    );
    json["remaining_ms"] = json!(holder.remaining.map(millis));
    json["also_ends"] = json!(holder.also_ends);
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use leasehold::Token;

    use super::*;

    #[test]
    fn json_has_all_that_is_known() {
        let mut holder = Holder::new("g");
        assert_eq!(
            as_json("k", Some(&holder)).to_string(),
            r#"{"also_ends":0,"held":true,"key":"k","label":null,"owner":null,"remaining_ms":null,"since":null,"token":null}"#
        );
        holder.token = Some(Token::new(u64::MAX));
        holder.since = Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_500));
        holder.remaining = Some(Duration::from_millis(1_234));
        let json = as_json("k", Some(&holder));
        assert_eq!(json["token"], u64::MAX);
        assert_eq!(json["since"], "1970-01-01T00:00:01.500Z");
        assert_eq!(json["remaining_ms"], 1_234);
    }

    #[test]
    fn nothing_from_the_store_steers_the_terminal() {
        let mut holder = Holder::new("g");
        holder.label = Some("a\x1b[2J\nb".into());
        let text = as_text("k", Some(&holder));
        assert!(text.contains("a\u{fffd}[2J\u{fffd}b"), "{text:?}");
    }
}
