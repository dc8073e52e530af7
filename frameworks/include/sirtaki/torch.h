// This header includes all of Sirtaki for LibTorch programs. A program needs these lines:
//
//   sirtaki::init();
//   torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.01 * sirtaki::size()));
//   auto optimizer = sirtaki::DistributedOptimizer(std::move(sgd), model->named_parameters());
//   sirtaki::broadcast_parameters(*model, /*root_rank=*/0);
//   sirtaki::broadcast_optimizer_state(optimizer, /*root_rank=*/0);
//   … train on this rank's share of the data …
//   sirtaki::shutdown();
#pragma once

#include "sirtaki/barrier.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/check_parameters.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/collectives.h"
#include "sirtaki/compression.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/elastic.h"
#include "sirtaki/error.h"
#include "sirtaki/grad_scaler.h"
#include "sirtaki/gradient_bucket.h"
#include "sirtaki/handle.h"
#include "sirtaki/init_options.h"
#include "sirtaki/memory.h"
#include "sirtaki/memory_plan.h"
#include "sirtaki/mesh.h"
#include "sirtaki/messages.h"
#include "sirtaki/metrics.h"
#include "sirtaki/movement.h"
#include "sirtaki/objects.h"
#include "sirtaki/observability.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/optimizer_options.h"
#include "sirtaki/pipeline.h"
#include "sirtaki/process_set.h"
#include "sirtaki/random.h"
#include "sirtaki/rank_zero_first.h"
#include "sirtaki/recompute.h"
#include "sirtaki/reductions.h"
#include "sirtaki/sampler.h"
#include "sirtaki/session.h"
#include "sirtaki/sync_batch_norm.h"
#include "sirtaki/tensor_parallel.h"
#include "sirtaki/version.h"
