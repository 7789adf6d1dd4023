use std::fmt::Write as _;
use std::io::Write as _;

use leasehold::{Examination, Examined, Finding, Guarantees, Severity, shown};
use serde_json::{Value, json};

use crate::choose::guarantees_as_json;
use crate::cli::{DoctorArgs, StoreArgs};
use crate::exit::{Exit, Failure};
use crate::output::{self, BAD, BOLD, GOOD, WARN};
use crate::store;

/// Examines the store.
pub(crate) fn doctor(store: &StoreArgs, args: &DoctorArgs) -> Result<Exit, Failure> {
    let name = store.url.as_deref().filter(|url| !url.is_empty());
    let name = name.map_or_else(|| "the default store".into(), shown);
    let outcome = store::runtime()?.block_on(async {
        let locks = store.open().await?;
        let examination = locks.examine().await;
        let guarantees = locks.guarantees();
        // Nothing is held: what cannot be given back ends by itself.
        locks.close().await.ok();
        Ok::<_, Failure>(examination.map(|it| (guarantees, it))?)
    });
    let text = match (&outcome, args.json) {
        (Ok((guarantees, found)), true) => format!("{}\n", as_json(&name, guarantees, found)),
        (Ok((guarantees, found)), false) => as_text(&name, guarantees, found),
        (Err(failure), true) if failure.exit() != Exit::Usage => {
            format!(
                "{}\n",
                json!({ "store": name, "error": failure.to_string() })
            )
        }
        (Err(_), _) => String::new(),
    };
    output::written(anstream::stdout().write_all(text.as_bytes()))?;
    let (_, examination) = outcome?;
    Ok(match examination.severity() {
        None | Some(Severity::Note) => Exit::Done,
        Some(Severity::Danger) => Exit::Unsafe,
        Some(_) => Exit::No,
    })
}

fn as_text(name: &str, guarantees: &Guarantees, examination: &Examination) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}\n", output::printable(name));
    for server in &examination.servers {
        text.push_str(&server_as_text(server));
    }
    text.push_str("promises\n");
    for (field, value) in [
        ("consistency", format!("{:?}", guarantees.consistency)),
        ("node losses", guarantees.node_losses.to_string()),
        ("expiry", format!("{:?}", guarantees.expiry)),
        ("shortest ttl", output::short(guarantees.shortest_ttl)),
        ("fairness", format!("{:?}", guarantees.fairness)),
        ("wake-up", format!("{:?}", guarantees.wakeup)),
        ("tokens", format!("{:?}", guarantees.tokens)),
    ] {
        line(&mut text, field, &value);
    }
    let mut findings: Vec<&Finding> = examination.findings.iter().collect();
    findings.sort_by_key(|it| std::cmp::Reverse(it.severity));
    for finding in &findings {
        let style = match finding.severity {
            Severity::Note => BOLD,
            Severity::Warning => WARN,
            _ => BAD,
        };
        let (what, advice) = (
            output::printable(&finding.what),
            output::printable(&finding.advice),
        );
        // A String takes everything.
        write!(
            text,
            "{style}{}{style:#}: {what}\n  {advice}\n",
            finding.severity
        )
        .ok();
    }
    if findings.is_empty() {
        writeln!(text, "{GOOD}nothing to warn of{GOOD:#}").ok();
    }
    text
}

fn server_as_text(server: &Examined) -> String {
    let mut text = format!("{}\n", output::printable(&server.address));
    if let Some(version) = &server.version {
        line(&mut text, "version", &output::printable(version));
    }
    if let Some(taken) = server.round_trip {
        let micros = taken.as_micros();
        let shown = format!("{}.{:02} ms", micros / 1000, micros % 1000 / 10);
        line(&mut text, "round trip", &shown);
    }
    if let Some(ahead) = server.clock_ahead_ms {
        let side = if ahead < 0 { "behind" } else { "ahead" };
        line(
            &mut text,
            "clock",
            &format!("{} ms {side}", ahead.unsigned_abs()),
        );
    }
    for (fact, value) in &server.facts {
        line(&mut text, fact, &output::printable(value));
    }
    text
}

fn line(text: &mut String, name: &str, value: &str) {
    // A String takes everything.
    writeln!(text, "  {name:16} {value}").ok();
}

fn as_json(name: &str, guarantees: &Guarantees, examination: &Examination) -> Value {
    let servers: Vec<Value> = examination
        .servers
        .iter()
        .map(|server| {
            let facts: serde_json::Map<String, Value> = server
                .facts
                .iter()
                .map(|(fact, value)| (fact.to_string(), Value::from(value.as_str())))
                .collect();
            json!({
                "address": server.address,
                "version": server.version,
                "round_trip_us": server
                    .round_trip
                    .map(|taken| u64::try_from(taken.as_micros()).unwrap_or(u64::MAX)),
                "clock_ahead_ms": server.clock_ahead_ms,
                "facts": facts,
            })
        })
        .collect();
    let findings: Vec<Value> = examination
        .findings
        .iter()
        .map(|finding| {
            json!({
                "severity": finding.severity.to_string(),
                "id": finding.id,
                "what": finding.what,
                "advice": finding.advice,
            })
        })
        .collect();
    json!({
        "store": name,
        "error": null,
        "severity": examination.severity().map(|it| it.to_string()),
        "servers": servers,
        "guarantees": guarantees_as_json(guarantees),
        "findings": findings,
    })
}
