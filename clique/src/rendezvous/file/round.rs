//! What is in the folder of a round.

use crate::CliqueError;
use crate::rendezvous::board::{Key, out_of_range};
use crate::rendezvous::file::folder::Folder;
use crate::rendezvous::file::participant_of;
use crate::rendezvous::wire::{Frame, HEADER_BYTES, MAX_REQUEST_BYTES, Wrong};
use crate::rendezvous::{Post, has_ended};

/// The folder with the round's first failure.
const FAILED: &str = "failed";

fn file_of(participant: u32) -> String {
    format!("post.{participant}")
}

/// Puts a participant's post into a round.
pub(super) fn write(round: &Folder, participant: u32, key: &Key, post: Post) -> Result<(), CliqueError> {
    let (file, is_failure) = (file_of(participant), matches!(post, Post::Failed(_)));
    let bytes = Frame::Post { key: key.clone(), post }.encode();
    if is_failure {
        round.put_first(FAILED, &format!(".{FAILED}.{participant}"), &file, &bytes)?;
    }
    round.write(&file, &bytes)
}

/// Reads what was said in a round and is not in `said` yet. Returns whether the round has ended, complete or with a
/// failure; with `only_at_the_end` nothing is read before it has.
pub(super) fn read(
    round: &Folder,
    key: &Key,
    said: &mut [Option<Post>],
    only_at_the_end: bool,
) -> Result<bool, CliqueError> {
    let names = round.names()?;
    let has_failed = names.iter().any(|name| name == FAILED);
    let posts = || names.iter().filter_map(|name| participant_of(name, "post"));
    if only_at_the_end && !has_failed && posts().count() < said.len() {
        return Ok(false);
    }
    for participant in posts() {
        let Some(place @ None) = said.get_mut(participant as usize) else { continue };
        *place = read_post(round, key, participant)?;
    }
    let first = if has_failed { read_first_failure(round, key)? } else { None };
    // A failure counts once the first is seen, which was there before it.
    for place in said.iter_mut().filter(|said| matches!(said, Some(Post::Failed(_)))) {
        *place = None;
    }
    if let Some((participant, post)) = first {
        let count = said.len() as u32;
        let place = said.get_mut(participant as usize);
        *place.ok_or_else(|| out_of_range(participant, count))? = Some(post);
    }
    Ok(has_ended(said))
}

/// Of several failures one stays, the same for everybody: the one in this folder, which is made once. `None` while the
/// round is being removed.
fn read_first_failure(round: &Folder, key: &Key) -> Result<Option<(u32, Post)>, CliqueError> {
    let Some(folder) = Folder::existing(round.file(FAILED), round.owner())? else { return Ok(None) };
    let Some(participant) = folder.names()?.iter().find_map(|name| participant_of(name, "post")) else {
        return Ok(None);
    };
    Ok(read_post(&folder, key, participant)?.map(|post| (participant, post)))
}

fn read_post(folder: &Folder, key: &Key, participant: u32) -> Result<Option<Post>, CliqueError> {
    let file = file_of(participant);
    let Some(bytes) = folder.read(&file, HEADER_BYTES + MAX_REQUEST_BYTES)? else { return Ok(None) };
    let peer = || format!("participant {participant}, in {}", folder.file(&file).display());
    match Frame::decode(&bytes, MAX_REQUEST_BYTES).map_err(|wrong| wrong.from(&peer()))? {
        Frame::Post { key: of, post } if of == *key => Ok(Some(post)),
        Frame::Post { key: of, .. } => Err(Wrong::new("round", key, of).from(&peer())),
        other => Err(Wrong::new("frame", "a post", other.kind()).from(&peer())),
    }
}
