#pragma once
#include "torch_standin.h"
