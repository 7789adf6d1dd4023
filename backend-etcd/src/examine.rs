//! What the cluster says of itself.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::Member;
use leasehold_core::{Error, Examination, Examined, Moment, Severity};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::EtcdOptions;
use crate::endpoints::{Channel, Endpoints};
use crate::link::Link;

/// The members of the cluster, as one of them knows them.
pub(crate) struct Members {
    /// Those that vote.
    voting: usize,
    learning: usize,
    /// How many may be lost.
    pub(crate) spare: u32,
}

impl Members {
    pub(crate) async fn ask(link: &Link, options: &EtcdOptions) -> Result<Self, Error> {
        let list = |channel: Arc<Channel>, _| async move { channel.members().await };
        let list = link
            .endpoints
            .request(options.connect_timeout, list)
            .await?;
        let (learning, voting): (Vec<_>, Vec<_>) = list.iter().partition(|it| it.is_learner());
        let places = voting.iter().map(|it| places(it)).collect::<Vec<_>>();
        let named = options.servers().map(|(address, _)| address).collect();
        Ok(Self {
            voting: voting.len(),
            learning: learning.len(),
            spare: spare(&places, &named),
        })
    }

    fn majority_spares(&self) -> u32 {
        u32::try_from(self.voting.saturating_sub(1) / 2).unwrap_or(u32::MAX)
    }
}

fn places(member: &Member) -> Vec<String> {
    let urls = member.client_urls().iter();
    urls.map(|url| {
        let place = url.split_once("://").map_or(&**url, |(_, place)| place);
        place.trim_end_matches('/').to_owned()
    })
    .collect()
}

/// How many members may be lost: as many as a majority can do without, and no more than there are
/// others that this client can turn to. A name that is no member's own may be that of a balancer
/// before all of them.
fn spare(members: &[Vec<String>], named: &HashSet<String>) -> u32 {
    let majority_spares = members.len().saturating_sub(1) / 2;
    let is_member = |name: &String| members.iter().any(|places| places.contains(name));
    let spare = if named.iter().all(is_member) {
        let known = members
            .iter()
            .filter(|places| places.iter().any(|place| named.contains(place)));
        majority_spares.min(known.count().saturating_sub(1))
    } else {
        majority_spares
    };
    u32::try_from(spare).unwrap_or(u32::MAX)
}

/// Asks each member that was named, all at once.
pub(crate) async fn examine(link: &Link, options: &EtcdOptions) -> Examination {
    let mut examination = Examination::new();
    match Members::ask(link, options).await {
        Ok(members) => judge_members(&members, &mut examination),
        Err(error) => examination.find(
            Severity::Warning,
            "members-unknown",
            format!("which members there are could not be asked: {error}"),
            "without that, this client promises to survive the loss of none",
        ),
    }
    let mut asking = JoinSet::new();
    for index in 0..link.endpoints.count() {
        let (endpoints, limit) = (link.endpoints.clone(), options.connect_timeout);
        let probe = format!("{}leasehold-probe", options.prefix);
        let _task = asking.spawn(async move {
            let member = ask_member(&endpoints, index, &probe, limit).await;
            (index, member)
        });
    }
    let mut answers = asking.join_all().await;
    answers.sort_by_key(|(index, _)| *index);
    for (index, answer) in answers {
        match answer {
            Ok((server, troubles)) => {
                for trouble in troubles {
                    judge_trouble(&server.address, &trouble, &mut examination);
                }
                examination.servers.push(server);
            }
            Err(error) => {
                let address = link.endpoints.name(index);
                examination.find(
                    Severity::Warning,
                    "member-down",
                    format!("the member {address} does not answer: {error}"),
                    "bring it back: one more may be too many",
                );
                examination.servers.push(Examined::new(address));
            }
        }
    }
    examination
}

/// What one member says, and what troubles it. One that answers is not down, also if it cannot read.
async fn ask_member(
    endpoints: &Endpoints,
    index: usize,
    probe: &str,
    limit: Duration,
) -> Result<(Examined, Vec<String>), Error> {
    let silent = || endpoints.silent(index, limit);
    let asking = async {
        let channel = endpoints.channel(index).await?;
        let status = channel.status().await;
        let status = status.map_err(|error| endpoints.map(&channel, &error))?;
        Ok((channel, status))
    };
    let asked = timeout(limit, asking).await;
    let (channel, status) = asked.unwrap_or_else(|_elapsed| Err(silent()))?;
    let mut server = Examined::new(endpoints.name(index));
    server.version = Some(status.version().to_owned());
    let id = status.header().map_or(0, |header| header.member_id());
    server.fact(
        "role",
        match status.leader() {
            _ if status.is_learner() => "learner",
            leader if leader == id => "leader",
            _ => "follower",
        },
    );
    server.fact("database", format!("{} bytes", status.db_size()));
    let mut troubles = status.errors().to_vec();
    if status.leader() == 0 {
        troubles.push("etcdserver: no leader".into());
    }
    if !status.is_learner() {
        let reading = async {
            let read = shortest_read(&channel, probe).await;
            read.map_err(|error| endpoints.map(&channel, &error))
        };
        let read = timeout(limit, reading).await;
        match read.unwrap_or_else(|_elapsed| Err(silent())) {
            Ok(taken) => server.round_trip = Some(taken),
            Err(failed) if troubles.is_empty() => troubles.push(Error::from(failed).to_string()),
            // What it says of itself is why.
            Err(_) => {}
        }
    }
    Ok((server, troubles))
}

async fn shortest_read(channel: &Channel, probe: &str) -> Result<Duration, etcd_client::Error> {
    const TIMES: usize = 3;
    let mut shortest = Duration::MAX;
    for _ in 0..TIMES {
        let sent = Moment::now();
        channel.kv.clone().get(probe, None).await?;
        shortest = shortest.min(sent.elapsed());
    }
    Ok(shortest)
}

fn judge_members(members: &Members, examination: &mut Examination) {
    let Members {
        voting, learning, ..
    } = *members;
    if voting < 3 {
        examination.find(
            Severity::Warning,
            "too-few-members",
            format!(
                "the cluster has {} that votes: when one is lost no lock is granted or kept, and tokens are as safe as its disk",
                if voting == 1 { "one member".to_owned() } else { format!("{voting} members") }
            ),
            "run three or five members",
        );
    } else if members.spare < members.majority_spares() {
        examination.find(
            Severity::Warning,
            "members-not-named",
            format!(
                "{voting} members vote, but this client was told of too few of them: when those are lost it has nobody to turn to"
            ),
            "name all members in the URL, with commas between them",
        );
    }
    if voting >= 3 && voting % 2 == 0 {
        examination.find(
            Severity::Note,
            "even-members",
            format!(
                "{voting} members bear the loss of no more than {} do",
                voting - 1
            ),
            "run an odd number of members",
        );
    }
    if learning > 0 {
        examination.find(
            Severity::Note,
            "learners",
            format!("{learning} of the members only learn, and do not count"),
            "promote them when they have caught up",
        );
    }
}

fn judge_trouble(address: &str, trouble: &str, examination: &mut Examination) {
    let (severity, id, advice) = if trouble.contains("CORRUPT") {
        (
            Severity::Danger,
            "corrupt",
            "its data differs from the others': replace the member",
        )
    } else if trouble.contains("NOSPACE") {
        (
            Severity::Warning,
            "no-space",
            "no new lock is granted: compact, defragment and disarm the alarm, and turn on automatic compaction",
        )
    } else {
        (
            Severity::Warning,
            "member-in-trouble",
            "see its log, and whether it reaches the others",
        )
    };
    let what = format!("the member {address} reports: {trouble}");
    examination.find(severity, id, what, advice);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(count: usize) -> Vec<Vec<String>> {
        (1..=count)
            .map(|index| vec![format!("m{index}:2379")])
            .collect()
    }

    fn named<const N: usize>(names: [&str; N]) -> HashSet<String> {
        names.map(|name| format!("{name}:2379")).into()
    }

    #[test]
    fn a_majority_and_somebody_to_turn_to_must_be_left() {
        assert_eq!(spare(&members(1), &named(["m1"])), 0);
        assert_eq!(spare(&members(2), &named(["m1", "m2"])), 0);
        assert_eq!(spare(&members(3), &named(["m1", "m2", "m3"])), 1);
        assert_eq!(spare(&members(4), &named(["m1", "m2", "m3", "m4"])), 1);
        assert_eq!(spare(&members(5), &named(["m1", "m2"])), 1);
        assert_eq!(spare(&members(5), &named(["m1", "m2", "m3"])), 2);
        assert_eq!(spare(&members(3), &named(["m2"])), 0);
        assert_eq!(spare(&members(3), &named(["balancer"])), 1);
        assert_eq!(spare(&[], &named(["m1"])), 0);
    }
}
