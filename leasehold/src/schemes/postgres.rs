use super::Scheme;
#[cfg(feature = "postgres")]
use super::{Address, Opening};

pub(super) const SHORT: Scheme = Scheme {
    name: "postgres",
    form: "postgres://host/database",
    options: &[
        "key_form",
        "sequence",
        "max_sessions",
        "max_holds",
        "connect_timeout",
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "password",
        "application_name",
        "options",
    ],
    feature: "postgres",
    #[cfg(feature = "postgres")]
    open: Some(open),
    #[cfg(not(feature = "postgres"))]
    open: None,
};

/// As libpq has it, both.
pub(super) const LONG: Scheme = Scheme {
    name: "postgresql",
    ..SHORT
};

#[cfg(feature = "postgres")]
fn open(address: Address) -> Opening {
    Box::pin(async move {
        let options = opening::options(&address)?;
        let postgres = leasehold_postgres::Postgres::connect_with(options).await?;
        Ok(Box::new(postgres) as Box<dyn leasehold_core::Backend>)
    })
}

#[cfg(feature = "postgres")]
mod opening {
    use leasehold_core::Result;
    use leasehold_postgres::{KeyForm, PostgresOptions};

    use crate::schemes::Address;
    use crate::setting::Setting;

    /// The backend's own, with the names and values of [`PostgresOptions`]; all others are libpq's.
    const OWN: [&str; 5] = [
        "key_form",
        "sequence",
        "max_sessions",
        "max_holds",
        "connect_timeout",
    ];

    pub(super) fn options(address: &Address) -> Result<PostgresOptions> {
        let mut libpq = form_urlencoded::Serializer::new(String::new());
        for setting in &address.settings {
            if !OWN.contains(&setting.name()) {
                libpq.append_pair(setting.name(), setting.text());
            }
        }
        let mut options = PostgresOptions::new(format!("{}?{}", address.text, libpq.finish()))?;
        if let Some(form) = address.setting("key_form") {
            options = options.with_key_form(match form.text() {
                "name" => KeyForm::Name,
                "bigint" => KeyForm::Bigint,
                "int_pair" => KeyForm::IntPair,
                _ => return Err(form.wrong("is none of name, bigint and int_pair")),
            });
        }
        if let Some(sequence) = address.setting("sequence") {
            options = options.with_sequence(sequence.text());
        }
        if let Some(sessions) = address.setting("max_sessions") {
            options = options.with_max_sessions(count(sessions)?);
        }
        if let Some(holds) = address.setting("max_holds") {
            options = options.with_max_holds(count(holds)?);
        }
        if let Some(timeout) = address.setting("connect_timeout") {
            options = options.with_connect_timeout(timeout.limit()?);
        }
        Ok(options)
    }

    fn count(setting: &Setting) -> Result<usize> {
        let number = setting.text().parse();
        number.map_err(|_error| setting.wrong("is no number"))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn shown(text: &str, query: &str) -> Result<String> {
            let settings = Setting::parse(query)?;
            let text = text.to_owned();
            options(&Address { text, settings }).map(|options| format!("{options:?}"))
        }

        #[test]
        fn options_of_both_kinds_are_taken() {
            let all = "key_form=int_pair&sequence=a.b&max_sessions=3&max_holds=5&connect_timeout=2s\
                       &port=7&dbname=a%26b&sslmode=require";
            let shown = shown("postgres://app@db.example", all).unwrap();
            for part in [
                "db.example:7/a&b",
                "IntPair",
                "\"a.b\"",
                "max_sessions: 3",
                "Some(5)",
                "2s",
            ] {
                assert!(shown.contains(part), "{part} in {shown}");
            }
        }

        #[test]
        fn wrong_values_are_refused() {
            for wrong in [
                "key_form=oid",
                "max_holds=many",
                "connect_timeout=0s",
                "sslmode=maybe",
            ] {
                assert!(shown("postgres://h", wrong).is_err(), "{wrong}");
            }
        }
    }
}
