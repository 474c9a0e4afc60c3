//! Commands that ask a daemon that runs: how they reach it, and how they write what it says.

use super::CliError;
use crate::bounded_file::read_bytes;
use clap::Args;
use kvd_client::{
    BearerToken, Client, ClientIdentity, ClientOptions, Endpoint, Namespace, TlsOptions,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most time for one call.
const CALL_TIME: Duration = Duration::from_secs(30);
/// Most time for a probe to connect, and to be answered.
const PROBE_TIME: Duration = Duration::from_secs(3);

/// The daemon, and whose sequences and sessions are meant.
#[derive(Args)]
pub(super) struct DaemonArgs {
    /// The daemon: http://HOST:PORT, https://HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ENDPOINT", default_value = "http://127.0.0.1:7070")]
    endpoint: Endpoint,
    #[command(flatten)]
    secrets: SecretArgs,
    /// Namespace of the sequences and sessions.
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = parse_namespace)]
    namespace: Namespace,
}

/// Files that say who asks, and whom to trust.
#[derive(Args)]
pub(super) struct SecretArgs {
    /// Authorities of an https daemon, a PEM file; the system's when absent.
    #[arg(long, value_name = "FILE", env = "KVD_CLIENT_CA")]
    ca: Option<PathBuf>,
    /// Certificate to show, a PEM file; with --key.
    #[arg(long, value_name = "FILE", requires = "key", env = "KVD_CLIENT_CERT")]
    cert: Option<PathBuf>,
    /// Its private key, a PEM file.
    #[arg(long, value_name = "FILE", requires = "cert", env = "KVD_CLIENT_KEY")]
    key: Option<PathBuf>,
    /// A file that holds the bearer token.
    #[arg(long, value_name = "FILE", env = "KVD_CLIENT_TOKEN_FILE")]
    token_file: Option<PathBuf>,
}

fn read_secret(path: &Path) -> Result<Vec<u8>, CliError> {
    read_bytes(path).map_err(|error| CliError::Usage(format!("{}: {error}", path.display())))
}

impl SecretArgs {
    /// How a client connects with them.
    pub(super) fn client_options(&self) -> Result<ClientOptions, CliError> {
        let mut tls = TlsOptions::default();
        if let Some(path) = &self.ca {
            tls = tls.with_ca(read_secret(path)?);
        }
        if let (Some(certificate), Some(key)) = (&self.cert, &self.key) {
            let (certificate_pem, key_pem) = (read_secret(certificate)?, read_secret(key)?);
            tls = tls.with_identity(ClientIdentity { certificate_pem, key_pem });
        }
        let mut options = ClientOptions::default().with_tls(tls);
        if let Some(path) = &self.token_file {
            let text = String::from_utf8(read_secret(path)?).unwrap_or_default();
            let token = BearerToken::new(&text).ok_or_else(|| {
                CliError::Usage(format!("{}: holds no token of one line", path.display()))
            })?;
            options = options.with_token(token);
        }
        Ok(options)
    }
}

impl DaemonArgs {
    /// A client for one short question: whoever does not answer at once is not well.
    pub(super) async fn connect_briefly(&self) -> Result<Client, CliError> {
        let options = self.secrets.client_options()?.with_connect_timeout(PROBE_TIME);
        let client = Client::connect_with(self.endpoint.clone(), &options).await;
        Ok(client.map_err(CliError::Unreachable)?.with_timeout(PROBE_TIME))
    }

    /// The namespace that is asked about.
    pub(super) fn namespace_name(&self) -> String {
        self.namespace.as_str().to_owned()
    }

    /// A client of the daemon.
    pub(super) async fn connect_client(&self) -> Result<Client, CliError> {
        let options = self.secrets.client_options()?;
        let client = Client::connect_with(self.endpoint.clone(), &options).await;
        let client = client.map_err(CliError::of_connection)?;
        Ok(client.with_namespace(&self.namespace).with_timeout(CALL_TIME))
    }
}

/// A namespace of a flag.
pub(super) fn parse_namespace(text: &str) -> Result<Namespace, String> {
    Namespace::new(text).map_err(|error| error.to_string())
}

/// A length of time as a number and its unit: `500ms`, `90s`, `10m`, `2h`, `1d`.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit.trim() {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" | "min" => Some(60_000),
        "h" => Some(3_600_000),
        "d" => Some(86_400_000),
        _ => None,
    };
    let ms = number.parse::<u64>().ok().zip(unit_ms);
    let ms = ms.and_then(|(number, unit_ms)| number.checked_mul(unit_ms)).filter(|ms| *ms > 0);
    ms.map(Duration::from_millis).ok_or_else(|| "expected a time such as 90s, 10m or 2h".to_owned())
}

/// Milliseconds in at most six columns.
pub(super) fn format_time(ms: u64) -> String {
    const MINUTE: u64 = 60_000;
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..MINUTE => format!("{} s", ms / 1000),
        MINUTE..3_600_000 => format!("{} min", ms / MINUTE),
        3_600_000..172_800_000 => format!("{} h", ms / 3_600_000),
        _ => format!("{} d", (ms / 86_400_000).min(9999)),
    }
}

/// Bytes in at most ten columns.
pub(super) fn format_bytes(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

/// The end of a text that is longer than so many columns: there names differ.
pub(super) fn shorten_text(text: &str, columns: usize) -> String {
    let length = text.chars().count();
    if length <= columns {
        return text.to_owned();
    }
    let end: String = text.chars().skip(length + 1 - columns).collect();
    format!("…{end}")
}

/// The rows of a list as JSON.
pub(super) fn json_text(rows: &impl serde::Serialize) -> Result<String, CliError> {
    Ok(serde_json::to_string_pretty(rows).map_err(anyhow::Error::from)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        let read = |text| parse_duration(text).ok().map(|time: Duration| time.as_millis());
        assert_eq!(read("500ms"), Some(500));
        assert_eq!(read("90s"), Some(90_000));
        assert_eq!(read(" 10 m"), Some(600_000));
        assert_eq!((read("2h"), read("1d")), (Some(7_200_000), Some(86_400_000)));
        for bad in ["", "10", "m", "-1s", "1.5h", "0s", "10 weeks", "99999999999999999999s"] {
            assert_eq!(read(bad), None, "{bad}");
        }
        assert_eq!(read("18446744073709551615d"), None);
    }

    #[test]
    fn times_and_bytes_fit_their_columns() {
        let times = [0, 999, 1000, 59_999, 60_000, 3_599_999, 3_600_000, 172_800_000, u64::MAX];
        let shown = times.map(format_time);
        assert_eq!(shown[..4], ["0 ms", "999 ms", "1 s", "59 s"]);
        assert_eq!(shown[4..], ["1 min", "59 min", "1 h", "2 d", "9999 d"]);
        assert_eq!([0, 1 << 20].map(format_bytes), ["0 B", "1.0 MiB"]);
        assert_eq!(format_bytes((1 << 30) - 1).chars().count(), 10);
    }

    #[test]
    fn long_names_show_their_ends() {
        assert_eq!(shorten_text("meta-llama/Llama-3.1-8B-Instruct", 12), "…8B-Instruct");
        assert_eq!(shorten_text("tiny", 4), "tiny");
    }
}
