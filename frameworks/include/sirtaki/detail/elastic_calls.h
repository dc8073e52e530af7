// These calls are what elastic training asks of the job. Programs use sirtaki/elastic.h.
#pragma once

#include <cstdint>
#include <string>

#include "sirtaki/export.h"

namespace sirtaki::detail {

SIRTAKI_API bool IsElastic();         // sirtakirun has started this process for an elastic job
SIRTAKI_API int ElasticGeneration();  // 0: it had no place in one yet
// This rank has the state that all train from, which is that of rank `root`.
SIRTAKI_API void TellElasticState(int root);
// No group can train from the state that these ranks have, for this reason. If that is because of one
// `rank`, which lacks a state that others have, sirtakirun drops it; else it ends the job. -1: it is not
// because of one.
SIRTAKI_API void TellElasticCannotGoOn(const std::string& why, int rank);
// Why the ranks are to leave the generation between two steps; empty: they are not. This rank may know it
// before others.
SIRTAKI_API std::string ElasticChange();
SIRTAKI_API void CheckJob();  // throws what is wrong with it
// Says whether optimizers and modules that are made now are set up when elastic::run() begins. Ranks that
// come later would be alone with what they agree on before.
SIRTAKI_API bool IsDeferred();

// An ElasticRun lives as long as one elastic::run(), in its thread. The constructor throws InvalidArgument
// within another run(), and in an elastic job after another one.
class SIRTAKI_API ElasticRun {
 public:
  ElasticRun();
  ~ElasticRun();
  ElasticRun(const ElasticRun&) = delete;
  ElasticRun& operator=(const ElasticRun&) = delete;

  // Notes an error of the job. False: there were too many that no progress and no loss of a rank has
  // parted, and the last one is the caller's. `peer_lost`: the error says that a rank was lost.
  // `reached`: how far the training has come; to come farther than before is progress.
  bool GoesOnAfterError(bool peer_lost, std::int64_t reached);

 private:
  int failures_ = 0;
  std::int64_t reached_ = -1;  // the farthest
  int generation_ = 0;
};

}  // namespace sirtaki::detail
