// Drafts from all earlier passages that end with a request's last tokens, in its own tokens and in recent answers.
//
// The passages form a tree: the longest common context is its root, and each token that followed it is a branch. The
// tree is never built. Every place is in a chain with the other places of the same context, and a lookup follows one
// chain. (Oliaro et al., "SuffixDecoding", 2024, builds the tree.)
#pragma once

#include <cstdint>

namespace engine {

// A place is the index of a token that follows a context of `context_length` tokens.
struct Suffixes {
  int32_t context_length;     // tokens that must match
  int32_t longest_match;      // longer matches count as matches of this length
  float drafts_per_match;     // the maximum number of drafts for each matched token
  float least_share;          // drafts end at a token on which fewer than this share of the passages agree
  int32_t num_buckets;        // the buckets of a slot, a power of two
  int32_t history_buckets;    // a power of two
  int32_t* heads;             // [slots, num_buckets], the last place of each chain; 0 if it is empty
  int32_t* previous;          // [slots, max_model_len], the place before in the same chain; 0 if there is none
  int32_t* num_indexed;       // [slots], the tokens that are in chains
  int32_t* source_distance;   // [slots], the distance to the last long passage; 0 without one
  int32_t* source_length;     // [slots], the tokens of the request when its drafts came from there
  int64_t history_size;       // a power of two; 0 for no history
  int64_t history_begin;      // the first token that counts
  int64_t history_end;        // the tokens ever written; token i is at i modulo `history_size`
  int32_t* history_tokens;    // [history_size], answers, with -1 after each
  int64_t* history_previous;  // [history_size]
  int64_t* history_heads;     // [history_buckets], 0 if the chain is empty
};

// Writes drafts after the tokens of a slot. Returns their number; 0 if no passage matches more than `longest` tokens.
int32_t draft_from_suffixes(Suffixes& suffixes, int64_t slot, int64_t max_model_len, int32_t* tokens, int32_t length,
                            int32_t most, int32_t longest);

// Writes drafts that continue the passage which the request copied last, skipping tokens in which it differed. Returns
// their number.
int32_t draft_after_edit(const Suffixes& suffixes, int64_t slot, int32_t* tokens, int32_t length, int32_t most);

// Appends an answer to the history.
void remember_answer(Suffixes& suffixes, const int32_t* tokens, int32_t count);

}  // namespace engine
