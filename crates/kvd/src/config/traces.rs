//! Where traces of calls go.

use super::ConfigError;
use super::raw::TraceSettings;

const ENDPOINT: &str = "traces.endpoint";
const RATIO: &str = "traces.sample_ratio";

/// A collector, and how many calls it is told of.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceConfig {
    /// Its address, `http://` or `https://`.
    pub endpoint: String,
    /// Share of the calls without a `traceparent` that are traced, 0 to 1.
    pub sample_ratio: f64,
}

impl TraceConfig {
    /// None where no collector is named.
    ///
    /// # Errors
    /// An endpoint that is no address of HTTP, a ratio that is no share.
    pub(super) fn validate_raw(raw: &TraceSettings) -> Result<Option<Self>, ConfigError> {
        let sample_ratio = raw.sample_ratio;
        if !(0.0..=1.0).contains(&sample_ratio) {
            return Err(ConfigError::new(RATIO, format!("{sample_ratio} is not 0 to 1")));
        }
        let endpoint = raw.endpoint.trim();
        if endpoint.is_empty() {
            return Ok(None);
        }
        let address = endpoint.parse::<http::Uri>().ok();
        let is_http = address.is_some_and(|address| {
            matches!(address.scheme_str(), Some("http" | "https"))
                && address.host().is_some_and(|host| !host.is_empty())
        });
        if !is_http {
            let reason = format!("{endpoint:?} is no address such as http://127.0.0.1:4317");
            return Err(ConfigError::new(ENDPOINT, reason));
        }
        Ok(Some(Self { endpoint: endpoint.to_owned(), sample_ratio }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validate_traces(
        endpoint: &str,
        sample_ratio: f64,
    ) -> Result<Option<TraceConfig>, ConfigError> {
        TraceConfig::validate_raw(&TraceSettings { endpoint: endpoint.to_owned(), sample_ratio })
    }

    #[test]
    fn collectors_have_addresses_of_http_and_ratios_are_shares() {
        assert_eq!(validate_traces(" ", 1.0).unwrap(), None);
        for endpoint in ["http://127.0.0.1:4317", "https://collector.example", "http://[::1]:4317"]
        {
            assert_eq!(validate_traces(endpoint, 0.5).unwrap().unwrap().endpoint, endpoint);
        }
        for endpoint in ["127.0.0.1:4317", "localhost", "ftp://a:1", "http://", "http://a b"] {
            let error = validate_traces(endpoint, 0.5).expect_err(endpoint);
            assert_eq!(error.key, ENDPOINT, "{error}");
        }
        for ratio in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert_eq!(validate_traces("", ratio).expect_err("no share").key, RATIO);
        }
    }
}
