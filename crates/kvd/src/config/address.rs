//! Where a listener listens: an address, a host's name with a port, or the path of a socket.

use super::ConfigError;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

/// Longest list of addresses in a message.
const NAMED_MAX: usize = 8;

/// Bytes of a Unix socket's path, beside the zero that ends it in `sockaddr_un`.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Refuses paths that are too long, and one path for two sockets.
pub(super) fn check_socket_paths(
    unix: Option<&Path>,
    region: Option<&Path>,
) -> Result<(), ConfigError> {
    let sockets = [("server.listen_unix", unix), ("server.listen_region", region)];
    for (key, path) in sockets {
        let bytes = path.map_or(0, |path| path.as_os_str().len());
        if bytes > SOCKET_PATH_BYTES_MAX {
            let reason = format!(
                "the path has {bytes} bytes; that of a Unix socket has at most \
                 {SOCKET_PATH_BYTES_MAX}"
            );
            return Err(ConfigError::new(key, reason));
        }
    }
    // Components leave out what a path says twice.
    let [unix, region] = sockets.map(|(_, path)| Some(path?.components().collect::<PathBuf>()));
    if unix.is_some() && unix == region {
        let reason = "is the same path as server.listen_unix; each needs its own";
        return Err(ConfigError::new("server.listen_region", reason));
    }
    Ok(())
}

/// The address of a setting; an empty text is none. A host's name is looked up, once: of an IPv4
/// and an IPv6 address the first is taken, of several of a kind none.
pub(super) fn parse_address(
    key: &'static str,
    text: &str,
) -> Result<Option<SocketAddr>, ConfigError> {
    if text.is_empty() {
        return Ok(None);
    }
    if let Ok(address) = text.parse() {
        return Ok(Some(address));
    }
    let refused = |reason: String| ConfigError::new(key, format!("{text:?} {reason}"));
    let is_host = |host: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        // Of digits and dots alone it is a mistyped address.
        host.chars().all(known) && host.chars().any(|c| c.is_ascii_alphabetic())
    };
    match text.rsplit_once(':') {
        Some((host, port)) if is_host(host) && port.parse::<u16>().is_ok() => {}
        None if is_host(text) => {
            return Err(refused(format!("has no port: write {text}:7070, for example")));
        }
        _ => {
            return Err(refused(
                "is not an address such as 127.0.0.1:7070, [::1]:7070 or \
                                 localhost:7070"
                    .to_owned(),
            ));
        }
    }
    let found = text.to_socket_addrs();
    let found = found.map_err(|error| refused(format!("cannot be looked up: {error}")))?;
    one_of(found.collect()).map(Some).map_err(refused)
}

/// The address to listen at, of those that a name stands for.
fn one_of(mut found: Vec<SocketAddr>) -> Result<SocketAddr, String> {
    found.sort();
    found.dedup();
    let (four, six): (Vec<_>, Vec<_>) = found.iter().partition(|address| address.is_ipv4());
    match (&four[..], &six[..]) {
        ([], []) => Err("stands for no address".to_owned()),
        ([address], [] | [_]) | ([], [address]) => Ok(*address),
        _ => {
            let named: Vec<_> = found.iter().take(NAMED_MAX).map(SocketAddr::to_string).collect();
            Err(format!("stands for several addresses; give one of {}", named.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_name_of_this_host_is_its_loopback_address() {
        let address = parse_address("server.listen_tcp", "localhost:7070").unwrap().unwrap();
        assert!(address.ip().is_loopback() && address.port() == 7070, "{address}");
        assert_eq!(parse_address("admin.listen", "[::1]:1").unwrap(), "[::1]:1".parse().ok());
        assert_eq!(parse_address("admin.listen", "").unwrap(), None);
    }

    #[test]
    fn a_name_of_several_addresses_is_refused_with_them() {
        let both = one_of(addresses(&["[::1]:7", "127.0.0.1:7", "127.0.0.1:7"])).unwrap();
        assert_eq!(both.to_string(), "127.0.0.1:7");
        assert_eq!(one_of(addresses(&["[::1]:7"])).unwrap().to_string(), "[::1]:7");
        let error = one_of(addresses(&["10.0.0.2:7", "10.0.0.1:7"])).unwrap_err();
        assert_eq!(error, "stands for several addresses; give one of 10.0.0.1:7, 10.0.0.2:7");
        assert!(one_of(addresses(&["[::1]:7", "[fe80::1]:7"])).is_err());
        assert!(one_of(Vec::new()).unwrap_err().contains("no address"));
    }

    #[test]
    fn what_is_no_address_is_told_what_is() {
        for (text, part) in [
            ("nowhere", "has no port: write nowhere:7070"),
            (":7070", "such as"),
            ("127.0.0.1", "such as"),
            ("1.2.3:7070", "such as"),
            ("127.0.0.1:70700", "such as"),
            ("localhost:port", "such as"),
            ("http://localhost:7070", "such as"),
            ("::1:7070x", "such as"),
            ("no-such-host.invalid:7070", "cannot be looked up"),
        ] {
            let error = parse_address("server.listen_tcp", text).expect_err(text).to_string();
            assert!(error.contains("server.listen_tcp") && error.contains(part), "{error}");
        }
    }
}
