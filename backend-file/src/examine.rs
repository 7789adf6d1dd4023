//! What there is to say of the folder.

use std::fs;
use std::path::Path;

use leasehold_core::{Examination, Examined, Severity};

/// Looks at where the folder lies.
pub(crate) fn examine(folder: &Path) -> Examination {
    let mut server = Examined::new(folder.display().to_string());
    let mut examination = Examination::new();
    // Linux only; elsewhere nothing is known, and nothing said.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if let Some(kind) = file_system(folder, &mounts) {
        server.fact("file system", kind);
        if is_network(kind) {
            examination.find(
                Severity::Danger,
                "network-file-system",
                format!(
                    "{} lies on a network file system ({kind}): locks may be lost without notice when the connection or the server fails",
                    folder.display()
                ),
                "use a folder on a disk of this machine, or for several machines a server",
            );
        }
    }
    examination.servers.push(server);
    examination
}

/// The kind of file system that `folder` is on, by the lines of `mountinfo`: the deepest mount above
/// it, and of those in one place the last.
fn file_system<'a>(folder: &Path, mounts: &'a str) -> Option<&'a str> {
    mounts
        .lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let place = Path::new(before.split(' ').nth(4)?);
            let kind = after.split(' ').next()?;
            let depth = place.components().count();
            folder.starts_with(place).then_some((depth, kind))
        })
        .max_by_key(|(depth, _)| *depth)
        .map(|(_, kind)| kind)
}

fn is_network(kind: &str) -> bool {
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "afs",
        "ceph",
        "glusterfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
    ]
    .contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
21 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
35 21 0:30 / /srv rw shared:2 - ext4 /dev/vdb rw
36 35 0:31 /x /srv/shared rw shared:3 - nfs4 server:/x rw,vers=4.2
37 21 0:32 / /home rw - ext4 /dev/vdc rw
38 21 0:33 / /home rw - cifs //server/home rw
";

    #[test]
    fn the_deepest_and_last_mount_counts() {
        let on = |folder: &str| file_system(Path::new(folder), MOUNTS);
        assert_eq!(on("/var/lib/locks"), Some("ext4"));
        assert_eq!(on("/srv/locks"), Some("ext4"));
        assert_eq!(on("/srv/shared/locks"), Some("nfs4"));
        assert_eq!(
            on("/srv/shared2"),
            Some("ext4"),
            "a name is compared as a whole"
        );
        assert_eq!(on("/home/ann"), Some("cifs"));
        assert_eq!(file_system(Path::new("/x"), ""), None);
    }

    #[test]
    fn network_file_systems_are_known() {
        assert!(is_network("nfs4") && is_network("cifs"));
        assert!(!is_network("ext4") && !is_network("overlay"));
    }
}
