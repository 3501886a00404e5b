"""A user's file for --advantage."""


def centred(rewards, group_ids, lengths):
    return rewards - rewards.nanmean()
