// These calls are what elastic training asks of the job. Programs use sirtaki/elastic.h.
#pragma once

#include <string>

#include "sirtaki/export.h"

namespace sirtaki::detail {

SIRTAKI_API bool IsElastic();         // sirtakirun has started this process for an elastic job
SIRTAKI_API int ElasticGeneration();  // 0: it had no place in one yet
SIRTAKI_API void TellElasticState();  // this rank has the state that all train from
// Why the ranks are to leave the generation between two steps; empty: they are not. This rank may know it
// before others.
SIRTAKI_API std::string ElasticChange();

}  // namespace sirtaki::detail
