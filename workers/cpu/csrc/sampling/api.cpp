#include "api.h"
#include "sampling/draft_lookup.h"

using namespace engine;

ENGINE_API void engine_look_up_drafts(DraftLookup* lookup, const int64_t* slots, int32_t num_slots,
                                      int64_t max_model_len, int32_t* token_ids, const int32_t* num_tokens) {
  look_up_drafts(*lookup, slots, num_slots, max_model_len, token_ids, num_tokens);
}

ENGINE_API void engine_remember_answer(Suffixes* suffixes, const int32_t* tokens, int32_t count) {
  remember_answer(*suffixes, tokens, count);
}
