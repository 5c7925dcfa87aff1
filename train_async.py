import sys

from slime.train_async import main

sys.exit(main())
