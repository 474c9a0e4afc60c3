//! Runs one command for so long at most, with what it prints in a file. A command is a process
//! group of its own, of which nothing is left when it ends.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);
/// How long a killed process is waited for: one that the driver holds may never end.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// How a command ended.
pub(super) enum ProcessEnd {
    /// By itself.
    By(ExitStatus),
    /// It was killed at its limit, and is gone.
    Killed,
    /// It was killed at its limit, and is still there.
    Stays,
}

/// Runs a command, whose output goes to the end of the file `log`; gives how it ended and what it
/// printed.
pub(super) fn run_limited(
    command: &mut Command,
    limit: Duration,
    log: &Path,
) -> io::Result<(ProcessEnd, String)> {
    let mut log = OpenOptions::new().create(true).append(true).read(true).open(log)?;
    let start = log.seek(SeekFrom::End(0))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let mut child = command.process_group(0).spawn()?;
    let ended = wait_for(&mut child, limit);
    // Processes that a command leaves behind hold GPU memory.
    kill_group(child.id());
    let ended = match ended? {
        Some(status) => ProcessEnd::By(status),
        None if wait_for(&mut child, LAST_WAIT)?.is_some() => ProcessEnd::Killed,
        None => ProcessEnd::Stays,
    };
    Ok((ended, read_from(&mut log, start)?))
}

fn read_from(log: &mut File, start: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    log.seek(SeekFrom::Start(start))?;
    log.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn wait_for(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() >= limit {
            return Ok(None);
        }
        sleep(POLL);
    }
}

/// Kills what is left of a process group, if anything is. The shell's own `kill`: the standard
/// library has none for groups, and not every machine has the program.
fn kill_group(leader: u32) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "kill -s KILL -- -$0 2>/dev/null"]).arg(leader.to_string());
    // It fails where nothing is left.
    let _ = shell.status();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> (ProcessEnd, String) {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, "of others\n").unwrap();
        run_limited(Command::new("sh").args(["-c", script]), limit, &log).unwrap()
    }

    /// Waits until a process is gone.
    fn is_gone(pid: &str) -> bool {
        let runs = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            // Not one that nobody has waited for yet.
            stat.is_ok_and(|stat| !stat.contains(") Z "))
        };
        (0..500).any(|_| {
            sleep(POLL);
            !runs()
        })
    }

    #[test]
    fn a_command_that_sleeps_is_killed_with_its_children_at_its_limit() {
        let begun = Instant::now();
        let script = "sleep 60 & echo $!; sleep 60";
        let (ended, output) = shell(script, Duration::from_millis(300));
        assert!(matches!(ended, ProcessEnd::Killed));
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert!(is_gone(&output), "{output}");
    }

    #[test]
    fn a_command_that_ends_leaves_no_child() {
        let (ended, output) = shell("sleep 60 & echo $!; exit 3", Duration::from_secs(30));
        assert!(matches!(ended, ProcessEnd::By(status) if status.code() == Some(3)));
        assert!(is_gone(&output), "{output}");
    }
}
